"""Tiny task files, and settings that replace the bundled backbone by a tiny one."""

import gzip
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from streamlearn.bench.learn import arms


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
def on_the_tiny_backbone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every arm use the tiny backbone in float32."""
    small = {
        **arms.NANO,
        "backbone": {"model": str(tiny), "dtype": "float32", "device": "cpu"},
        "stream": {"max_tokens": 128, "batch_tokens": 128, "batch_records": 4},
        "probe": {"warmup_tokens": 64, "similarity_tokens": 64},
    }
    monkeypatch.setattr(arms, "NANO", small)
