"""Damage done to image files, and hostile image files.

Each mutation takes the bytes of a valid file and a source of randomness, and returns the bytes that a record would
hold.
"""

import gzip
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO

from PIL import Image

LARGEST_SHARE = 0.02
"""Share of images of the largest permitted size among the pixel bombs; each takes a second to decode."""
LARGEST_SIDE, BOMB_SIDE = 4000, 6000
"""Side of the largest square that is permitted, and of one that is not, in pixels."""
Mutation = Callable[[bytes, random.Random], bytes]


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 20)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def overwritten(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data)), rng.randint(1, 64)
    filling = rng.randbytes(length) if rng.random() < 0.5 else b"\xff" * length
    return data[:start] + filling + data[start + length :]


def doubled(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    piece = data[start : start + rng.randint(1, 400)]
    return data[:start] + piece * rng.choice((2, 20)) + data[start:]


def header(data: bytes, rng: random.Random) -> bytes:
    if not data.startswith(b"\x89PNG"):
        return flipped(data[:64], rng) + data[64:]
    width, height = (rng.choice((0, 1, 3, 5000, 50_000, 1 << 31, (1 << 32) - 1)) for _ in range(2))
    body = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + body + struct.pack(">I", zlib.crc32(body)) + data[33:]


def wrong_beginning(data: bytes, rng: random.Random) -> bytes:
    """Replace the magic number with that of another format, or drop it."""
    begin = rng.choice(
        (b"", b"GIF89a", b"BM", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"SIMPLE  =", b"%PDF-1.7")
    )
    return begin + data[rng.choice((0, 8)) :]


def text_bomb(data: bytes, rng: random.Random) -> bytes:
    """Insert a compressed text chunk that expands to 100 MB into a PNG."""
    if not data.startswith(b"\x89PNG"):
        return overwritten(data, rng)
    body = b"zTXtkey\0\0" + _bomb()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:33] + chunk + data[33:]


def pixel_bomb(data: bytes, rng: random.Random) -> bytes:
    """Return a small valid file with far too many pixels, or occasionally one with as many as are permitted."""
    del data
    return rng.choice(_blanks(LARGEST_SIDE if rng.random() < LARGEST_SHARE else BOMB_SIDE))


def fits_bomb(data: bytes, rng: random.Random) -> bytes:
    """Return a gzipped FITS file, on its own or after the magic number of a permitted format."""
    begin = rng.choice((b"", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP"))
    return begin + _fits() + data[:20]


def animated(data: bytes, rng: random.Random) -> bytes:
    del data
    return rng.choice(_two_frames())


def prepare() -> None:
    """Make now what is made once, some seconds and a hundred megabytes, before anything is measured."""
    for side in (LARGEST_SIDE, BOMB_SIDE):
        _blanks(side)
    for make in (_two_frames, _bomb, _fits):
        make()


@cache
def _blanks(side: int) -> tuple[bytes, ...]:
    files = []
    for kind in ("PNG", "WEBP", "JPEG"):
        out = BytesIO()
        Image.new("L", (side, side)).save(out, kind)
        files.append(out.getvalue())
    return tuple(files)


@cache
def _two_frames() -> tuple[bytes, ...]:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    files = []
    for kind in ("PNG", "WEBP"):
        out = BytesIO()
        frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=100)
        files.append(out.getvalue())
    return tuple(files)


@cache
def _bomb() -> bytes:
    return zlib.compress(b"\0" * 100_000_000, 9)


@cache
def _fits() -> bytes:
    cards = ("SIMPLE  =                    T", "BITPIX  =                    8", "NAXIS   =                    2")
    sizes = ("NAXIS1  =                50000", "NAXIS2  =                50000", "END")
    return gzip.compress(b"".join(card.ljust(80).encode() for card in (*cards, *sizes)) + b"\0" * 10_000_000, mtime=0)


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
