"""Cost of decoding images: training steps on the stream against the same steps on batches decoded beforehand.

Each record of `builtin:nano-vl` holds a question and one image: alternately a JPEG of 336 x 252 and a PNG of 64 x 64.
Images are decoded, resized and normalised in a thread ahead of the learner if a core is free (a GPU, or fewer threads
than cores), else between the learner's steps. With two threads on two cores the latter is faster: 0.92 of the speed on
decoded batches against 0.88 (eight pairs each, in turns).
"""

import base64
import tempfile
import time
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
from PIL import Image

from benchmarks.stream_batches import stream_batches
from streamlearn.daemon.build import Components
from streamlearn.settings import BackboneSettings, JsonlSettings, LogSettings, Settings, SourceSettings, StreamSettings
from streamlearn.stream.record import Batch

RECORDS = 160
STREAM = StreamSettings(max_tokens=512, batch_tokens=1024, batch_records=8)


def measure(rounds: int) -> dict[str, Any]:
    """Return the median tokens per second both ways, measured in turns, and the median of the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.jsonl"
        file.write_bytes(b"".join(map(_record, range(RECORDS))))
        _speed(file, ready=True)  # warms up
        pairs = [_pair(file, ready_first=number % 2 == 1) for number in range(rounds)]
    return {
        "image_path_tokens_per_s": round(median(path for path, _ in pairs)),
        "ready_tokens_per_s": round(median(ready for _, ready in pairs)),
        "image_path_over_ready": round(median(path / ready for path, ready in pairs), 3),
        "image_pairs": [round(path / ready, 3) for path, ready in pairs],
    }


def _pair(file: Path, *, ready_first: bool) -> tuple[float, float]:
    """The speeds on the stream and on decoded batches; the order alternates, since the second pass may be warmer."""
    speed = {ready: _speed(file, ready=ready) for ready in (ready_first, not ready_first)}
    return speed[False], speed[True]


def _record(number: int) -> bytes:
    side, kind = ((336, 252), "JPEG") if number % 2 else ((64, 64), "PNG")
    coarse = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    out = BytesIO()
    Image.fromarray(coarse).resize(side, Image.Resampling.BICUBIC).save(out, kind)
    image = base64.b64encode(out.getvalue()).decode()
    question = f"<image>\nQuestion: what is in picture {number}?\n\nOutput:"
    record = {"prompt": question, "completion": " a dog", "image": image}
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _speed(file: Path, *, ready: bool) -> float:
    """Tokens per second of one pass; with `ready`, batches are decoded before the clock starts."""
    with tempfile.TemporaryDirectory() as folder:
        components = Components(
            Settings(
                state=Path(folder),
                source=SourceSettings(jsonl=JsonlSettings(path=file)),
                stream=STREAM,
                backbone=BackboneSettings(model="builtin:nano-vl"),
                log=LogSettings(level="error"),
            )
        )
        batches: Iterable[Batch] = stream_batches(components)
        if ready:
            batches = list(batches)
        tokens, started = 0, time.perf_counter()
        for batch in batches:
            tokens += components.learner.step(batch.examples).tokens
        seconds = time.perf_counter() - started
        components.close()
    return tokens / seconds
