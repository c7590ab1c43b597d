"""The detection benchmark counts what its docstring defines."""

import gzip
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pytest
from rich.console import Console

from benchmarks import detect
from benchmarks.streams import (
    PASSAGE_CHARS,
    RAMP,
    Assigned,
    Boundary,
    Stream,
    StreamMaker,
    Task,
    one_to_one,
    read_folder,
    text_decoder,
    to_task,
)
from streamlearn.errors import UsageError
from streamlearn.settings import ShiftSettings
from streamlearn.shift.detector import Shift
from tests.shift.streams import stream as synthetic

NUM_TASKS = 6


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """Synthetic tasks with as many records as a small real one; every three records share a passage."""
    tasks = []
    for number in range(NUM_TASKS):
        examples = synthetic([number] * 90, seed=number)
        tasks.append(Task(f"task{number}", {"definition": examples, "bare": examples}, [i // 3 for i in range(90)]))
    return tasks


def shift(declared_at: int, *, slot: int = 1, known: bool = False) -> Shift:
    return Shift("inputs", 2, 2, slot, known, 1, declared_at, declared_at, 3.0, 2.0)


def stream(*boundaries: Boundary, records: int = 400, kind: str = "abrupt") -> Stream:
    return Stream(kind, "bare", (0,) * records, tuple(range(records)), boundaries)


def test_a_shift_detects_the_boundary_before_it() -> None:
    """At the boundary or within reach after it; not before it, and not after the next boundary."""
    first, second = Boundary(101, 1), Boundary(141, 2)
    found = detect.match(stream(first, second), [shift(1), shift(100), shift(140), shift(160)])
    assert found[first].declared_at == 140
    assert found[second].declared_at == 160


def test_a_late_shift_is_a_false_alarm() -> None:
    """It detects no boundary and lowers precision."""
    tally = detect.Tally()
    late = 101 + detect.WITHIN
    tally.add(stream(Boundary(101, 1)), Assigned([shift(1), shift(late)], [0] * 400, 1.0), None, [])
    metrics = tally.metrics()
    assert (metrics["recall"], metrics["precision"]) == (0.0, 0.0)
    assert metrics["false_alarms_per_10k"] == pytest.approx(25.0)


def test_a_shift_when_a_producer_leaves_is_optional() -> None:
    """Its absence is no miss, and its presence no false alarm."""
    for shifts in ([shift(1)], [shift(1), shift(110)]):
        tally = detect.Tally()
        tally.add(stream(Boundary(101, None)), Assigned(shifts, [0] * 400, 1.0), None, [])
        assert (tally.boundaries, tally.false_alarms) == (0, 0)


def test_a_recurrence_must_be_assigned_to_its_own_regime() -> None:
    """The regime that most of the task's earlier records were assigned to."""
    tasks = (0,) * 100 + (1,) * 100 + (0,) * 100
    boundaries = (Boundary(101, 1), Boundary(201, 0, returns=True))
    recurring = Stream("recurring", "bare", tasks, tuple(range(300)), boundaries)
    slots = [0] * 100 + [1] * 100 + [2] * 100
    for slot, recognized in ((0, 1), (2, 0)):
        tally = detect.Tally()
        found = Assigned([shift(1), shift(105), shift(205, slot=slot, known=True)], slots, 1.0)
        tally.add(recurring, found, None, [])
        assert (tally.returns, tally.recognized, tally.novelties, tally.declared_new) == (1, recognized, 1, 1)
        assert tally.assigned == 200


def test_slots_and_tasks_are_matched_one_to_one() -> None:
    """Neither a slot per record nor one slot for all records scores."""
    assert one_to_one([0, 0, 1, 1, 1], [3, 3, 0, 0, 0]) == {3: 0, 0: 1}
    assert len(one_to_one([0, 1, 1], [0, 0, 0])) == 1
    assert len(one_to_one([0, 0, 0], [0, 1, 2])) == 1


def test_streams_are_a_function_of_the_seed(tasks: list[Task]) -> None:
    """Other seeds make other streams."""
    one, same, other = (StreamMaker(tasks, seed, stationary_records=300).all("bare") for seed in (0, 0, 1))
    assert one == same
    assert one != other


def test_streams_have_the_properties_of_their_kind(tasks: list[Task]) -> None:
    """Boundaries are where the tasks change."""
    streams = {one.kind: one for one in StreamMaker(tasks, 3, stationary_records=300).all("bare")}
    abrupt = streams["abrupt"]
    changes = [i + 1 for i in range(1, len(abrupt.tasks)) if abrupt.tasks[i] != abrupt.tasks[i - 1]]
    assert [boundary.at for boundary in abrupt.boundaries] == changes
    assert 8 <= len(streams["recurring"].boundaries) <= 15
    assert any(boundary.returns for boundary in streams["recurring"].boundaries)
    at = streams["gradual"].boundaries[0].at - 1
    ramp = streams["gradual"].tasks[at : at + RAMP]
    assert np.mean(np.array(ramp[: RAMP // 4]) == ramp[0]) > 0.6 > np.mean(np.array(ramp[-RAMP // 4 :]) == ramp[0])
    assert {len(set(streams[f"interleaved_{n}"].tasks)) for n in (2, 3)} == {3, 4}
    for kind in detect.STATIONARY_KINDS:
        assert len(set(streams[kind].tasks)) == 1
        assert len(streams[kind].tasks) == 300


def test_order_by_passage_keeps_passages_together(tasks: list[Task]) -> None:
    """Seeds divisible by three use that order."""
    found = StreamMaker(tasks, 0, stationary_records=90).autocorrelated("bare")
    passages = [tasks[found.tasks[0]].passages[record] for record in found.records]
    assert sum(one != other for one, other in pairwise(passages)) == len(set(passages)) - 1


def test_dummies_score_as_dummies_do(tasks: list[Task]) -> None:
    """`never` has no recall and no false alarms; `always` has full recall and hardly any precision."""
    arms = detect.detectors(ShiftSettings())
    streams = StreamMaker(tasks, 0, stationary_records=300).all("bare")
    metrics = {
        name: detect.metrics([(one, *arms[name](one, tasks)) for one in streams], tasks)
        for name in ("always", "periodic", "never")
    }
    assert (metrics["never"]["recall"], metrics["never"]["false_alarms_per_10k"]) == (0.0, 0.0)
    assert metrics["always"]["recall"] == 1.0
    assert metrics["always"]["precision"] < 0.05
    assert metrics["always"]["false_alarms_per_10k"] > 9000
    assert metrics["periodic"]["recurrence_recall"] == 0.0


def test_the_default_detector_beats_the_dummies(tasks: list[Task]) -> None:
    """On tasks that hardly share a token it detects every boundary."""
    run = detect.detectors(ShiftSettings())["default"]
    streams = StreamMaker(tasks, 0, stationary_records=300).all("bare")
    metrics = detect.metrics([(one, *run(one, tasks)) for one in streams], tasks)
    assert metrics["recall"] == 1.0
    assert metrics["precision"] == 1.0
    assert metrics["record_assignment"] > 0.95
    assert metrics["us_per_record"] > 0


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    """The error names the option for another folder."""
    with pytest.raises(UsageError, match="--data"):
        read_folder(tmp_path)


@pytest.mark.long
def test_runs_on_any_folder_of_task_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole benchmark on four small tasks, as JSON and as a table."""
    subjects = ["river stone", "engine wheel", "violin string", "pepper salt"]
    for number, subject in enumerate(subjects):
        rows = [
            {
                "id": str(i),
                "task": f"task{number}",
                "definition": f"Say something about a {subject}.",
                "input": f"{i} {subject} " * (3 + i % 4),
                "output": subject,
            }
            for i in range(40)
        ]
        with gzip.open(tmp_path / f"task{number}_x.train.jsonl.gz", "wb") as file:
            file.write(b"\n".join(orjson.dumps(row) for row in rows))
    result = detect.measure(tmp_path, seeds=1, quick=True)
    assert result["default"]["recall"] == 1.0
    assert set(result["default"]["kinds"]) >= {"abrupt", "abrupt_bare", "interleaved_3_definition", "autocorrelated"}
    assert result["never"]["recall"] == 0.0
    assert result["setting"]["tasks"] == 4
    Console(width=detect.TABLE_WIDTH).print(detect.table(result))
    assert "window_32" in capsys.readouterr().out


def test_inputs_that_begin_alike_share_a_passage(tmp_path: Path) -> None:
    """The first `PASSAGE_CHARS` characters decide."""
    begin = "a" * PASSAGE_CHARS
    for number in range(4):
        rows = [
            {"id": "0", "task": "t", "definition": "d", "input": text, "output": "o"}
            for text in (f"{begin} one", f"{begin} two", "other")
        ]
        with gzip.open(tmp_path / f"task{number}_x.train.jsonl.gz", "wb") as file:
            file.write(b"\n".join(orjson.dumps(row) for row in rows))
    decoder, vocab_size = text_decoder()
    first = to_task("task0_x", read_folder(tmp_path)["task0_x"], decoder)
    assert list(first.passages) == [0, 0, 1]
    assert vocab_size >= 4096
    assert len(first.examples["bare"][0]) < len(first.examples["definition"][0])
