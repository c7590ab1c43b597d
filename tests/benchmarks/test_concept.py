"""The benchmark of concept drift: its streams and its measure of recovery."""

import gzip
from collections import Counter
from pathlib import Path

import orjson
import pytest

from benchmarks.concept import DISTINCT, PASSES, PASSES_AFTER, exchanged, recovery


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = ("angry", "happy", "sad")
    rows = [
        {"id": f"{i}", "task": "task1", "definition": "d", "input": f"text {i}", "output": names[i % 3]}
        for i in range(2 * DISTINCT)
    ]
    (tmp_path / "task1.train.jsonl.gz").write_bytes(gzip.compress(b"".join(orjson.dumps(r) + b"\n" for r in rows)))
    return tmp_path


def test_the_second_half_has_the_same_inputs_and_the_next_label(folder: Path) -> None:
    """In a new order, each label replaced by the next in alphabetical order, and the last by the first."""
    rows, half = exchanged(folder, "task1", seed=3)
    first, second = rows[:half], rows[half:]
    assert (half, len(second)) == (DISTINCT * PASSES, DISTINCT * PASSES_AFTER)
    assert Counter(r["prompt"] for r in first).keys() == Counter(r["prompt"] for r in second).keys()
    assert set(Counter(r["prompt"] for r in first).values()) == {PASSES}
    assert set(Counter(r["prompt"] for r in second).values()) == {PASSES_AFTER}
    before = {r["prompt"]: r["completion"] for r in first}
    after = {" angry": " happy", " happy": " sad", " sad": " angry"}
    assert all(row["completion"] == after[before[row["prompt"]]] for row in second)


def test_recovery_is_the_first_window_at_nine_tenths_of_the_level() -> None:
    """All correct, all wrong for a while, then all correct again; None if the stream ends too early."""
    half, wrong = 2 * DISTINCT, 120
    needed = wrong + round(0.9 * DISTINCT)
    back = [1.0] * half + [0.0] * wrong + [1.0] * DISTINCT
    assert recovery(back, half) == (1.0, needed)
    assert recovery(back[: half + needed], half) == (1.0, needed)
    assert recovery(back[: half + needed - 1], half) == (1.0, None)
