"""Fuzzing of the image decoder: damaged and hostile files are decoded or refused, within bounds of time and memory.

    python -m tests.fuzz.images --count 10000 [--data ../shared/data/images]

Mutates files of the folder, and generated ones: flipped, truncated, repeated and overwritten bytes, headers with wrong
sizes of up to four billion pixels per side, wrong magic numbers, text chunks that expand to a hundred megabytes,
gzipped FITS files, and animations. The result is one JSON object. `unaccounted` must be 0.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.backbones.image_tasks import arrays, png, rows
from benchmarks.measuring import peak_mib
from streamlearn.errors import RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.images import open_image
from tests.fuzz.image_damage import MUTATIONS, prepare


def originals(folder: Path | None) -> list[bytes]:
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


def fuzz(count: int, folder: Path | None, seed: int = 0) -> dict[str, Any]:
    files, limits, rng = originals(folder), StreamSettings(), random.Random(seed)
    for data in files:
        open_image(data, "image", limits)  # every original must decode; this also warms up the decoders
    prepare()
    outcomes: Counter[str] = Counter()
    slowest, slowest_mutation = 0.0, ""
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
            slowest, slowest_mutation = took, mutation.__name__
        outcomes[outcome] += 1
    return {
        "files": count,
        "outcomes": dict(outcomes),
        "unaccounted": count - outcomes.total(),
        "peak_memory_growth_mib": round(peak_mib() - before, 1),
        "slowest_ms": round(1000 * slowest, 1),
        "slowest_mutation": slowest_mutation,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of image sets; see benchmarks.backbones.image_tasks"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.stdout.write(json.dumps(fuzz(arguments.count, arguments.data, arguments.seed), indent=2) + "\n")


if __name__ == "__main__":
    main()
