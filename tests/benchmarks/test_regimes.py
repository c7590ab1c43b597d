"""Costs of many regimes, and returns: what they count, on a stream of three small tasks."""

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import regimes, returns
from benchmarks.regimes import draw, measure
from benchmarks.returns import TwoRounds
from streamlearn.errors import UsageError

TASKS = {
    "Name the color that the painter asked for, in lower case.": "red green blue brown",
    "How many of them are left? Answer with a number word.": "one two three four",
    "Which tool does this carpenter need next for such work?": "saw axe file drill",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks of 64 records, whose words differ."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl.gz"
    with gzip.open(file, "wb") as lines:
        for task, words in TASKS.items():
            for i in range(64):
                chosen = [words.split()[(i // 4**place) % 4] for place in range(3)]
                text = f"Definition: {task}\n\nInput: {' '.join(chosen)} {i}\n\nOutput: {chosen[i % 3]}"
                lines.write(orjson.dumps({"text": text, "source": task}) + b"\n")
    return file


@pytest.fixture(scope="module")
def result(texts: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(regimes, "WINDOW", 2)
        patched.setattr(regimes, "NEAR", 8)
        patched.setattr(regimes, "CHECKPOINTS", (2,))
        return measure(texts, tasks=3, records=32, backbone=None, seed=0)


def test_every_checkpoint_is_measured(result: dict[str, Any]) -> None:
    """At the wanted number and at the end; a snapshot links the regimes at rest, so not all of it is written."""
    first, last = result["checkpoints"]
    assert (first["regimes"], last["regimes"]) == (2, 3)
    assert last["records"] > first["records"]
    assert 0 < last["new_mib"] < last["snapshot_mib"]
    assert last["snapshot_mib"] > first["snapshot_mib"]
    for row in (first, last):
        assert 0.1 < row["step_over_one_regime"] < 10
        assert min(row["tokens_per_s"], row["other_ms_per_record"], row["memory_mib"], row["snapshot_s"]) > 0
    assert result["regimes_at_the_end"] == 3


def test_returns_are_recognized(result: dict[str, Any]) -> None:
    assert result["recognized"] == 1.0
    assert result["purity"] > 0.9


def test_a_return_to_another_regime_is_not_recognized() -> None:
    """Most of a segment's records decide; records in another task's regime are counted against purity."""
    rounds = TwoRounds(("a", "b", "b", "a"), 4, ())
    first, new = [1] * 4 + [2] * 4, {"taken_for_known": 0.0}
    assert rounds.returns([*first, 2, 2, 2, 1, *[1] * 4]) == {"recognized": 1.0, "purity": 0.9375, **new}
    assert rounds.returns([*first, *[3] * 4, 1, 1, 2, 1]) == {"recognized": 0.5, "purity": 0.6875, **new}


def test_a_new_task_in_another_ones_regime_was_taken_for_a_known_one() -> None:
    """Its return to that regime is a return all the same."""
    rounds = TwoRounds(("a", "b", "a", "b"), 4, ())
    assert rounds.returns([1] * 16) == {"recognized": 1.0, "taken_for_known": 0.5, "purity": 1.0}


def test_the_plot_is_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    draw(result, tmp_path / "regimes.png")
    assert (tmp_path / "regimes.png").stat().st_size > 5000


def test_too_few_tasks_are_named(texts: Path) -> None:
    with pytest.raises(UsageError, match="expected 4 tasks with 20 records, found 3; lower --tasks"):
        TwoRounds.draw(texts, tasks=4, records=10, seed=0)


def test_the_monitor_alone_finds_what_the_daemon_finds(texts: Path, result: dict[str, Any]) -> None:
    found = returns.measure(TwoRounds.draw(texts, tasks=3, records=32, seed=0))
    figures = {name: result[name] for name in ("recognized", "taken_for_known", "purity")}
    assert found == {"records": 32, "regimes": 3, **figures}
