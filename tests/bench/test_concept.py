import gzip
from collections import Counter
from pathlib import Path

import orjson
import pytest

from streamlearn.bench.concept import DISTINCT, PASSES, WINDOW, exchanged, recovery, table


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
    """As often, in another order, each label replaced by the one after it in the alphabet, the last by the first."""
    rows, half = exchanged(folder, "task1", seed=3)
    first, second = rows[:half], rows[half:]
    assert half == len(second) == DISTINCT * PASSES
    assert Counter(r["prompt"] for r in first) == Counter(r["prompt"] for r in second)
    assert set(Counter(r["prompt"] for r in first).values()) == {PASSES}
    before = {r["prompt"]: r["completion"] for r in first}
    after = {" angry": " happy", " happy": " sad", " sad": " angry"}
    assert all(row["completion"] == after[before[row["prompt"]]] for row in second)


def test_recovery_is_the_first_window_at_nine_tenths_of_the_level() -> None:
    """All right before, all wrong for a while, then all right again."""
    half, wrong = 200, 120
    correct = [True] * half + [False] * wrong + [True] * 200
    level, back = recovery(correct, half)
    assert level == 1.0
    assert back == wrong + round(0.9 * WINDOW)
    assert recovery([True] * half + [False] * 200, half) == (1.0, None)


def test_the_table_shows_what_never_happened_as_a_dash() -> None:
    """A figure that is not there is not a zero."""
    shown = table({"task1": {"declared_after": None, "level": 0.5}})
    assert [column.header for column in shown.columns] == ["answers exchanged", "declared after", "level"]
    assert list(shown.columns[1].cells) == ["-"]
