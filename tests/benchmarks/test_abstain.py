"""The benchmark of novelty detection counts what its docstring defines."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from benchmarks.abstain import RequestScores, auroc, read_tasks, run
from benchmarks.streams import Task
from streamlearn.errors import UsageError
from tests.shift.streams import stream as synthetic

NUM_TASKS = 5


def tasks() -> list[Task]:
    """Synthetic tasks of 120 records."""
    rows = [synthetic([number] * 120, seed=number) for number in range(NUM_TASKS)]
    return [Task(f"task{number}", {"definition": own, "bare": own}, [0] * 120) for number, own in enumerate(rows)]


def test_known_requests_are_the_rest_of_the_streams_tasks() -> None:
    """And unknown ones those of all others; synthetic tasks are told apart."""
    outcome = run(tasks(), [0, 3], "bare", np.random.default_rng(0))
    assert (len(outcome.known), len(outcome.unknown)) == (80, 2 * 3)
    metrics = outcome.metrics(0.01)
    assert metrics["auroc"] > 0.99
    assert metrics["known_rejected"] < 0.05
    assert metrics["unknown_detected"] == 1.0


def test_the_area_counts_ties_half() -> None:
    assert auroc(np.array([0.9, 0.5]), np.array([0.5, 0.1])) == (1 + 1 + 0.5 + 1) / 4


def test_outcomes_add_up() -> None:
    """Shares are of all requests together, times of all streams."""
    both = RequestScores([0.5, 0.001], [0.001], 1.0, 0.5) + RequestScores([0.5, 0.5], [0.5], 3.0, 1.5)
    assert both.metrics(0.01) == {
        "streams": 2,
        "known": 4,
        "unknown": 2,
        "auroc": 0.625,
        "known_rejected": 0.25,
        "unknown_detected": 0.5,
        "ms_per_request": round(4e3 / 6, 3),
        "classifier_ms": 1000.0,
    }


def files(folder: Path) -> tuple[Path, Path]:
    """A folder of two tasks, and a file of texts of two others, one with too few."""
    for number in (1, 2):
        rows = [
            {"id": f"{i}", "task": f"t{number}", "definition": "D", "input": f"i{i}", "output": "o"} for i in range(9)
        ]
        with gzip.open(folder / f"task{number}.train.jsonl.gz", "wb") as file:
            file.write(b"\n".join(map(orjson.dumps, rows)))
    texts: list[dict[str, Any]] = [
        {"text": f"Definition: E\n\nInput: a{i}\n\nOutput: b", "source": "c"} for i in range(100)
    ]
    texts += [{"text": "Definition: F\n\nInput: a\n\nOutput: b", "source": "small"}]
    with gzip.open(folder / "others.jsonl.gz", "wb") as file:
        file.write(b"\n".join(map(orjson.dumps, texts)))
    return folder, folder / "others.jsonl.gz"


def test_both_sources_have_the_same_prompts(tmp_path: Path) -> None:
    """Definition and input as in training; bare ones are shorter. A task with few texts is left out."""
    found, suite = read_tasks(*files(tmp_path), None, limit=5)
    assert [task.name for task in found] == ["task1", "task2", "c"]
    assert suite == [0, 1]
    for task in found:
        assert len(task.examples["bare"]) == 5
        assert task.examples["definition"][0].prompt_length > task.examples["bare"][0].prompt_length


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="set the folder with --data"):
        read_tasks(tmp_path, tmp_path / "others.jsonl.gz", None, limit=5)
    folder, others = files(tmp_path)
    others.unlink()
    with pytest.raises(UsageError, match="set the file of other tasks with --others"):
        read_tasks(folder, others, None, limit=5)
