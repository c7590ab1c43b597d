"""The benchmark on other tasks draws the streams that its docstring defines."""

import gzip
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from benchmarks import false_alarms
from benchmarks.false_alarms import KINDS, MIN_RECORDS, NUM_BOUNDARIES, ORDERS, Rate
from benchmarks.streams import Task
from streamlearn.errors import UsageError
from streamlearn.shift.detector import Shift
from tests.shift.records import features_of
from tests.shift.streams import stream as synthetic

RECORDS = np.arange(80)
ALARM = Shift("inputs", 2, 2, 1, False, 1, 70, 65, 2.0, 1.0)


def write_texts(file: Path, tasks: int) -> Path:
    rows = [
        {"text": f"Definition: do it\n\nInput: {i} {task}\n\nOutput: {i}", "source": f"superni:task{task}"}
        for task in range(tasks)
        for i in range(MIN_RECORDS)
    ]
    with gzip.open(file, "wb") as lines:
        lines.write(b"\n".join(orjson.dumps(row) for row in rows))
    return file


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_draws_every_record_equally_often(name: str) -> None:
    """No tenth of the records is drawn 15 % more or less often than it should be."""
    drawn = ORDERS[name](np.random.default_rng(0), 40_000, RECORDS)
    tenths = np.bincount(drawn // 8, minlength=10) / 4000
    assert np.abs(tenths - 1).max() < 0.15


@pytest.mark.parametrize(
    ("name", "expected"), [("independent", 0.0), ("autoregressive", 0.5), ("topics_4", 0.75), ("topics_8", 0.875)]
)
def test_neighbors_are_as_alike_as_the_order_says(name: str, expected: float) -> None:
    """Rank correlation of neighbors: a copula's is a little below its a; within a topic the order is random."""
    drawn = ORDERS[name](np.random.default_rng(1), 40_000, RECORDS)
    assert np.corrcoef(drawn[1:], drawn[:-1])[0, 1] == pytest.approx(expected, abs=0.05)


def test_similar_records_are_sorted_together() -> None:
    """Records of two tasks, shuffled, come apart."""
    features = [*features_of(0, 20), *features_of(1, 20)]
    order = np.random.default_rng(0).permutation(40)
    ranked = order[false_alarms.sort_by_similarity([features[i] for i in order])]
    assert {Counter((ranked[:20] < 20).tolist())[True], Counter((ranked[20:] < 20).tolist())[True]} == {0, 20}


def test_the_interval_refutes_a_level_that_does_not_hold() -> None:
    """Exact Poisson limits: 4 alarms in a million are 1.09 to 10.24 (Garwood 1936)."""
    shown = Rate(1_000_000, 4).to_json(target=1.0)
    assert (shown["per_million"], shown["interval_95"], shown["exceeds_target"]) == (4.0, [1.09, 10.24], True)
    assert not Rate(1_000_000, 4).to_json(target=3.0)["exceeds_target"]
    assert Rate(1_000_000, 0).to_json(target=1.0)["interval_95"] == [0.0, 3.69]


def test_a_shift_in_a_stationary_stream_is_a_false_alarm() -> None:
    """The first regime is not; a second task is, a few records after it began."""
    assert false_alarms.false_alarms(features_of(0, 150), 1.0) == []
    [alarm] = false_alarms.false_alarms([*features_of(0, 150), *features_of(1, 60)], 1.0)
    assert alarm.declared_at == pytest.approx(165, abs=15)
    assert false_alarms.kind_of(alarm) == "new"


@pytest.mark.parametrize(
    ("changes", "kind"), [({}, "new"), ({"known": True}, "return"), ({"parent": 1}, "split")], ids=KINDS
)
def test_a_false_alarm_has_a_kind(changes: dict[str, Any], kind: str) -> None:
    """A regime that was split off is not called new."""
    assert false_alarms.kind_of(replace(ALARM, **changes)) == kind


def test_streams_cover_the_records_asked_for() -> None:
    """Every order gets as many; the counts are a function of the arguments."""
    examples = synthetic([0] * MIN_RECORDS)
    task = Task("t", {"definition": examples, "bare": examples}, range(MIN_RECORDS))
    found = false_alarms.measure_level([task], 1.0, 1000, 1000)
    assert {name: rate["records"] for name, rate in found.items()} == dict.fromkeys(ORDERS, 1000)
    assert found == false_alarms.measure_level([task], 1.0, 1000, 1000)


def test_a_long_stream_also_has_a_rate_of_its_later_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thousandth record is young, the next one is settled."""
    alarms = [replace(ALARM, declared_at=at) for at in (6, 1000, 1001)]
    monkeypatch.setattr(false_alarms, "false_alarms", lambda stream, _: alarms[: len(stream) // 500])
    examples = synthetic([0] * MIN_RECORDS)
    task = Task("t", {"definition": examples, "bare": examples}, range(MIN_RECORDS))
    found = false_alarms.measure_level([task], 1.0, 3000, 1500)["independent"]
    assert (found["records"], found["alarms"]) == (3000, 6)
    assert found["kinds"] == {"new": 6, "return": 0, "split": 0}
    assert (found["settled"]["records"], found["settled"]["alarms"]) == (1000, 2)
    assert "settled" not in false_alarms.measure_level([task], 1.0, 1000, 1000)["independent"]


def test_reads_texts_and_makes_boundaries_between_them(tmp_path: Path) -> None:
    """A task's definition is in one prompt and not in the other; streams have the number of boundaries stated."""
    tasks, _ = false_alarms.read_tasks(write_texts(tmp_path / "texts.jsonl.gz", NUM_BOUNDARIES + 2))
    assert len(tasks) == NUM_BOUNDARIES + 2
    assert {len(task.examples["bare"]) for task in tasks} == {MIN_RECORDS}
    assert len(tasks[0].examples["bare"][0]) < len(tasks[0].examples["definition"][0])
    streams = false_alarms.boundary_streams(tasks, seeds=1)
    assert [len(stream.boundaries) for stream, _ in streams] == [NUM_BOUNDARIES] * 2


def test_a_file_without_enough_tasks_is_refused(tmp_path: Path) -> None:
    """Also one that does not exist; the error says what was found."""
    with pytest.raises(UsageError, match="found 2"):
        false_alarms.read_tasks(write_texts(tmp_path / "texts.jsonl.gz", 2))
    with pytest.raises(UsageError, match="--others"):
        false_alarms.read_tasks(tmp_path / "none.jsonl.gz")
