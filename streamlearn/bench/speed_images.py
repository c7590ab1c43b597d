"""What images cost on their way: the stream's steps against the same steps with everything decoded before.

Records hold one JPEG of 336 x 252 or one PNG of 64 x 64, in turn, and a question; `builtin:nano-vl` learns them.
Decoding, resizing and normalising run ahead of the learner in a thread where it leaves a core free (a GPU, or fewer
threads than cores), else between its steps: with two threads on two cores that is the faster of the two, 0.92 of ready
tensors against 0.88 (eight pairs each, in turns).
"""

import base64
import tempfile
import time
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
from PIL import Image

from streamlearn.runtime.components import Components
from streamlearn.settings import BackboneSettings, JsonlSettings, LogSettings, Settings, SourceSettings, StreamSettings

RECORDS = 320
STREAM = StreamSettings(max_tokens=512, batch_tokens=1024, batch_records=8)


def measure(rounds: int) -> dict[str, Any]:
    """Tokens per second both ways, in turns; and the median of the quotients."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.jsonl"
        file.write_bytes(b"".join(map(_record, range(RECORDS))))
        _speed(file, ready=True)  # the first pass warms up
        pairs = [_pair(file, ready_first=number % 2 == 1) for number in range(rounds)]
    return {
        "image_path_tokens_per_s": round(median(path for path, _ in pairs)),
        "ready_tokens_per_s": round(median(ready for _, ready in pairs)),
        "image_path_over_ready": round(median(path / ready for path, ready in pairs), 3),
        "image_pairs": [round(path / ready, 3) for path, ready in pairs],
    }


def _pair(file: Path, *, ready_first: bool) -> tuple[float, float]:
    """The stream's speed and that of the steps alone, in either order: the second pass is not always the warmer one."""
    speed = {ready: _speed(file, ready=ready) for ready in (ready_first, not ready_first)}
    return speed[False], speed[True]


def _record(number: int) -> bytes:
    side, kind = ((336, 252), "JPEG") if number % 2 else ((64, 64), "PNG")
    coarse = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    out = BytesIO()
    Image.fromarray(coarse).resize(side, Image.Resampling.BICUBIC).save(out, kind)
    image = base64.b64encode(out.getvalue()).decode()
    question = f"<image>\nQuestion: what is in picture {number}?\n\nOutput:"
    row = {"prompt": question, "completion": " a dog", "image": image}
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _speed(file: Path, *, ready: bool) -> float:
    """One pass over the stream."""
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
        batches = _batches(components)
        if ready:
            batches = iter(list(batches))
        tokens, started = 0, time.perf_counter()
        for batch in batches:
            tokens += components.learner.step(batch.examples).tokens
        seconds = time.perf_counter() - started
        components.close()
    return tokens / seconds


def _batches(components: Components) -> Any:
    while (batch := components.intake.next_batch(timeout_s=0.0)) is not None or not components.source.exhausted:
        if batch is not None:
            yield batch
    yield from components.intake.flush()
