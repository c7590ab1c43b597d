"""Tiny task files, and the profile of a tiny backbone."""

import gzip
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from benchmarks.learn.methods import Profile


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
def tiny_profile(tiny: Path) -> Profile:
    """Profile of the tiny backbone in float32 on the CPU, for short streams of short records."""
    return Profile(
        name="tiny",
        backbone=str(tiny),
        records=24,
        settings={
            "backbone.dtype": "float32",
            "backbone.device": "cpu",
            "stream.max_tokens": 128,
            "stream.batch_tokens": 128,
            "stream.batch_records": 4,
            "learner.lr": 0.001,
            "probe.warmup_tokens": 64,
            "probe.similarity_tokens": 64,
        },
    )


@pytest.fixture
def tiny_profile_file(tiny_profile: Profile, tmp_path: Path) -> Path:
    """The file of `tiny_profile`, for workers and commands."""
    file = tmp_path / "tiny.json"
    file.write_bytes(tiny_profile.to_json())
    return file
