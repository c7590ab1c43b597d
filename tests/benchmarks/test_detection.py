"""The benchmarks of detection count what their docstrings define."""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import orjson
import pytest

from benchmarks import assignment, detect
from benchmarks.concept import DISTINCT, PASSES, PASSES_AFTER, exchanged, recovery
from benchmarks.false_alarms import ORDERS, rate
from benchmarks.regimes import TwoRounds
from benchmarks.streams import Assigned, Boundary, Stream, StreamMaker, Task, run_monitor
from streamlearn.settings import ShiftSettings
from streamlearn.shift.detector import Shift
from streamlearn.shift.features import Featurizer
from streamlearn.shift.monitor import Monitor
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
    """Within reach and before the next boundary; every other one is a false alarm and lowers precision."""
    first, second = Boundary(101, 1), Boundary(141, 2)
    hits = detect.match(stream(first, second), [shift(1), shift(100), shift(140), shift(160)])
    assert (hits[first].declared_at, hits[second].declared_at) == (140, 160)
    tally = detect.Tally()
    tally.add(stream(first), Assigned([shift(1), shift(101 + detect.WITHIN)], [0] * 400, 1.0))
    metrics = tally.metrics()
    assert (metrics["recall"], metrics["precision"]) == (0.0, 0.0)
    assert metrics["false_alarms_per_10k"] == pytest.approx(25.0)


def test_a_recurrence_must_be_assigned_to_its_own_regime() -> None:
    """The regime that most of the task's earlier records were assigned to."""
    tasks = (0,) * 100 + (1,) * 100 + (0,) * 100
    boundaries = (Boundary(101, 1), Boundary(201, 0, returns=True))
    recurring = Stream("recurring", "bare", tasks, tuple(range(300)), boundaries)
    slots = [0] * 100 + [1] * 100 + [2] * 100
    for slot, recognized in ((0, 1), (2, 0)):
        tally = detect.Tally()
        tally.add(recurring, Assigned([shift(1), shift(105), shift(205, slot=slot, known=True)], slots, 1.0))
        assert (tally.returns, tally.recognized) == (1, recognized)
        assert tally.assigned == 200


def test_the_default_detector_finds_what_the_streams_hold(tasks: list[Task]) -> None:
    """On tasks that hardly share a token it detects every boundary; a detector that never declares, none."""
    maker = StreamMaker(tasks, 0, stationary_records=300)
    kinds = ("abrupt", "recurring", "stationary", "autocorrelated")
    streams = [made for made in maker.all("bare") if made.kind in kinds]
    assert streams[0] == StreamMaker(tasks, 0, stationary_records=300).all("bare")[0]
    by_name = detect.detectors(ShiftSettings())
    found, blind = (
        detect.metrics([(made, by_name[name](made, tasks)) for made in streams]) for name in ("default", "never")
    )
    assert (found["recall"], found["precision"], blind["recall"]) == (1.0, 1.0, 0.0)


def test_every_order_draws_every_record_equally_often() -> None:
    """No tenth of the records is drawn 15 % more or less often than it should be."""
    for order in ORDERS.values():
        drawn = order(np.random.default_rng(0), 40_000, np.arange(80))
        assert np.abs(np.bincount(drawn // 8, minlength=10) / 4000 - 1).max() < 0.15


def test_the_interval_refutes_a_level_that_does_not_hold() -> None:
    """Four alarms of one task show less than one each of four: every third resample leaves that task out.

    Exact Poisson limits: 4 alarms in a million are 1.09 to 10.24 (Garwood 1936).
    """
    records = np.full(100, 10_000)
    spread, clustered, none = np.zeros((3, 100), dtype=np.intp)
    spread[:4], clustered[0] = 1, 4
    shown = rate(spread, records, target=0.5)
    assert (shown["per_million"], shown["poisson_95"], shown["tasks_with_alarms"]) == (4.0, [1.09, 10.24], 4)
    assert shown["interval_95"] == [1.0, 8.0]
    assert shown["exceeds_target"]
    assert not rate(spread, records, target=1.0)["exceeds_target"]
    assert rate(clustered, records, target=0.5)["interval_95"][0] == 0.0
    assert rate(none, records, target=1.0)["poisson_95"] == [0.0, 3.69]


def test_a_task_in_two_regimes_costs_assignment_and_no_purity() -> None:
    """A regime with two tasks costs both. Two synthetic producers are told apart from the first record on."""
    tasks = [0, 0, 0, 0, 1, 1]
    divided, mixed = (
        assignment.mixture_metrics(tasks, Assigned([], slots, 1.0)) for slots in ([0, 0, 0, 1, 2, 2], [0] * 6)
    )
    assert (divided["purity"], divided["assignment"]) == (1.0, 5 / 6)
    assert (mixed["purity"], mixed["assignment"]) == (4 / 6, 4 / 6)
    order = assignment.turns(np.random.default_rng(0), 2, 1, 200)
    assigned = run_monitor(Monitor(ShiftSettings(), Featurizer(0)), synthetic(order))
    assert assignment.mixture_metrics(order, assigned)["purity"] > 0.95


def test_known_requests_are_the_rest_of_the_streams_tasks(tasks: list[Task], tmp_path: Path) -> None:
    """And unknown ones those of all others; synthetic tasks are told apart, by the gateway as by the monitor."""
    outcome = assignment.classify(tasks, [0, 3], "bare", np.random.default_rng(0), tmp_path)
    assert (len(outcome.known), len(outcome.unknown)) == (60, 2 * (NUM_TASKS - 2))
    metrics = outcome.metrics(0.01)
    assert metrics["auroc"] > 0.99
    assert (metrics["routed"], metrics["unknown_detected"], metrics["gateway_differs"]) == (1.0, 1.0, 0.0)


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


def test_a_return_to_another_regime_is_not_recognized() -> None:
    """Most of a segment's records decide; records in another task's regime are counted against purity."""
    rounds = TwoRounds(("a", "b", "b", "a"), 4, ())
    first, new = [1] * 4 + [2] * 4, {"taken_for_known": 0.0}
    assert rounds.returns([*first, 2, 2, 2, 1, *[1] * 4]) == {"recognized": 1.0, "purity": 0.9375, **new}
    assert rounds.returns([*first, *[3] * 4, 1, 1, 2, 1]) == {"recognized": 0.5, "purity": 0.6875, **new}
