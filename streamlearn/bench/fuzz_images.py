"""Damaged and hostile images through the decoder: each is decoded or refused with a reason, in little time and memory.

    python -m streamlearn.bench.fuzz_images --count 10000 [--data ../shared/data/images]

Mutations of real files (or, without a folder, of files made here): flipped, cut, doubled and overwritten bytes, headers
that promise other sizes, up to four billion pixels a side, the wrong beginning, text chunks that unpack to a hundred
megabytes, gzipped FITS, films. The result is one JSON object; `unaccounted` must be 0.
"""

import argparse
import gzip
import json
import random
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from streamlearn.backbone.image_tasks import arrays, png, rows
from streamlearn.bench.resident_memory import peak_mib
from streamlearn.errors import RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.image_decoding import open_image

LARGEST_SHARE = 0.02
"""Of the pixel bombs; each takes a second to decode."""
Mutation = Callable[[bytes, random.Random], bytes]


def originals(folder: Path | None) -> list[bytes]:
    """Whole files of the three formats."""
    pixels = [np.random.default_rng(seed).integers(0, 256, (40 + seed, 50, 3), dtype=np.uint8) for seed in range(6)]
    files = [png(each) for each in pixels]
    if folder is not None:
        files += [data for _, data in islice(rows(folder, "coco256", "train"), 40)]
        files += [png(each) for each, _ in islice(arrays(folder, "cifar10", "train"), 40)]
    for each in pixels:
        for kind in ("JPEG", "WEBP"):
            out = BytesIO()
            Image.fromarray(each).save(out, kind)
            files.append(out.getvalue())
    return files


def flipped(data: bytes, rng: random.Random) -> bytes:
    """A few bits."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 20)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    """The beginning alone."""
    return data[: rng.randrange(len(data))]


def overwritten(data: bytes, rng: random.Random) -> bytes:
    """A stretch of random bytes, or of the largest ones."""
    start, length = rng.randrange(len(data)), rng.randint(1, 64)
    filling = rng.randbytes(length) if rng.random() < 0.5 else b"\xff" * length
    return data[:start] + filling + data[start + length :]


def doubled(data: bytes, rng: random.Random) -> bytes:
    """A stretch that comes twice, or twenty times."""
    start = rng.randrange(len(data))
    piece = data[start : start + rng.randint(1, 400)]
    return data[:start] + piece * rng.choice((2, 20)) + data[start:]


def header(data: bytes, rng: random.Random) -> bytes:
    """A PNG whose header promises another size, with its checksum mended."""
    if not data.startswith(b"\x89PNG"):
        return flipped(data[:64], rng) + data[64:]
    width, height = (rng.choice((0, 1, 3, 5000, 50_000, 1 << 31, (1 << 32) - 1)) for _ in range(2))
    body = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + body + struct.pack(">I", zlib.crc32(body)) + data[33:]


def wrong_beginning(data: bytes, rng: random.Random) -> bytes:
    """Another format's first bytes, or none."""
    begin = rng.choice(
        (b"", b"GIF89a", b"BM", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"SIMPLE  =", b"%PDF-1.7")
    )
    return begin + data[rng.choice((0, 8)) :]


def text_bomb(data: bytes, rng: random.Random) -> bytes:
    """A PNG with a compressed text chunk that unpacks to 100 MB."""
    if not data.startswith(b"\x89PNG"):
        return overwritten(data, rng)
    body = b"zTXtkey\0\0" + _BOMB
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:33] + chunk + data[33:]


def pixel_bomb(data: bytes, rng: random.Random) -> bytes:
    """A whole file of far too many pixels, a few kilobytes long; now and then one of as many as are let in."""
    del data
    return rng.choice(_LARGEST if rng.random() < LARGEST_SHARE else _PIXEL_BOMBS)


def fits_bomb(data: bytes, rng: random.Random) -> bytes:
    """A gzipped FITS file, by itself or behind a beginning that is let in."""
    begin = rng.choice((b"", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP"))
    return begin + _FITS + data[:20]


def animated(data: bytes, rng: random.Random) -> bytes:
    """Two frames."""
    del data
    return _ANIMATED[rng.randrange(len(_ANIMATED))]


MUTATIONS: Sequence[Mutation] = (
    flipped,
    cut,
    overwritten,
    doubled,
    header,
    wrong_beginning,
    text_bomb,
    pixel_bomb,
    fits_bomb,
    animated,
)


def fuzz(count: int, folder: Path | None, seed: int = 0) -> dict[str, Any]:
    """Decode `count` mutated files."""
    files, limits, rng = originals(folder), StreamSettings(), random.Random(seed)
    for data in files:
        open_image(data, "image", limits)  # every original is a good one; also warms the decoders up
    outcomes: Counter[str] = Counter()
    slowest, worst = 0.0, ""
    before = peak_mib(restart=True)
    for number in range(count):
        mutation = MUTATIONS[number % len(MUTATIONS)]
        data = mutation(rng.choice(files), rng)
        started = time.perf_counter()
        try:
            open_image(data, "image", limits)
            outcome = "decoded"
        except RecordError as error:
            outcome = str(error.reason)
        took = time.perf_counter() - started
        if took > slowest:
            slowest, worst = took, mutation.__name__
        outcomes[outcome] += 1
    return {
        "files": count,
        "outcomes": dict(outcomes),
        "unaccounted": count - outcomes.total(),
        "peak_memory_growth_mib": round(peak_mib() - before, 1),
        "slowest_ms": round(1000 * slowest, 1),
        "slowest_mutation": worst,
    }


def _blank(kind: str, side: int) -> bytes:
    out = BytesIO()
    Image.new("L", (side, side)).save(out, kind)
    return out.getvalue()


def _two_frames(kind: str) -> bytes:
    out = BytesIO()
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=100)
    return out.getvalue()


_BOMB = zlib.compress(b"\0" * 100_000_000, 9)
_PIXEL_BOMBS = (_blank("PNG", 6000), _blank("WEBP", 6000), _blank("JPEG", 6000))
_LARGEST = (_blank("PNG", 4000), _blank("WEBP", 4000), _blank("JPEG", 4000))
_ANIMATED = (_two_frames("PNG"), _two_frames("WEBP"))
_FITS = gzip.compress(
    b"SIMPLE  =                    T".ljust(80)
    + b"BITPIX  =                    8".ljust(80)
    + b"NAXIS   =                    2".ljust(80)
    + b"NAXIS1  =                50000".ljust(80)
    + b"NAXIS2  =                50000".ljust(80)
    + b"END".ljust(80)
    + b"\0" * 10_000_000
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--data", type=Path, default=None, help="folder of image sets, see backbone.image_tasks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.stdout.write(json.dumps(fuzz(arguments.count, arguments.data, arguments.seed), indent=2) + "\n")


if __name__ == "__main__":
    main()
