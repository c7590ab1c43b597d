"""Tiny task files, and a profile for a tiny backbone."""

import gzip
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from streamlearn.bench.learn.profile import Profile


@pytest.fixture
def write_tasks(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder of tasks, each with one kind of question."""

    def write(*tasks: str, records: int = 24) -> Path:
        folder = tmp_path / "tasks"
        folder.mkdir(exist_ok=True)
        for task in tasks:
            for split, number in (("train", records), ("test", 6)):
                rows = [
                    {
                        "id": f"{i}",
                        "task": task,
                        "prompt": f"{task} {split} {i}, where is it?",
                        "answer": "here",
                    }
                    for i in range(number)
                ]
                data = b"".join(orjson.dumps(row) + b"\n" for row in rows)
                (folder / f"{task}.{split}.jsonl.gz").write_bytes(gzip.compress(data))
        return folder

    return write


@pytest.fixture
def profile(tiny: Path) -> Profile:
    """A profile for the tiny backbone in float32."""
    settings = {
        "backbone.dtype": "float32",
        "backbone.device": "cpu",
        "stream.max_tokens": 128,
        "stream.batch_tokens": 128,
        "stream.batch_records": 4,
        "learner.lr": 1e-3,
        "probe.warmup_tokens": 64,
        "probe.similarity_tokens": 64,
    }
    return Profile("tiny", str(tiny), settings=settings)
