"""Counters of a process: what Prometheus may take the rate of."""

from collections.abc import Callable

from streamlearn.daemon.status_publisher import ProcessCounter
from streamlearn.settings import Settings
from streamlearn.status import AdaptationStatus, Phase, Status
from tests.daemon.test_daemon import RUBBISH, backbone, make, records, run

__all__ = ["backbone", "make"]


def status(records_trained: int, dead: int, shifts: int) -> Status:
    return Status(
        Phase.RUNNING,
        records_trained=records_trained,
        dead_letters={"empty": dead, "not_json": 7},
        adaptation=AdaptationStatus(num_shifts={"inputs": shifts}),
    )


def test_counters_begin_at_zero_and_a_rollback_takes_nothing_back() -> None:
    """What is done again counts again."""
    counter = ProcessCounter()
    totals = [(1000, 5, 2), (1010, 6, 2), (900, 4, 1), (905, 5, 2)]
    found = [counter.update(status(*row)) for row in totals]
    assert [counts.records_trained for counts in found] == [0, 10, 10, 15]
    assert [counts.dead_letters.get("empty", 0) for counts in found] == [0, 1, 1, 2]
    assert [counts.shifts.get("inputs", 0) for counts in found] == [0, 0, 0, 1]
    assert all("not_json" not in counts.dead_letters for counts in found)


def test_a_restart_counts_only_what_it_does(make: Callable[..., Settings]) -> None:
    """The totals of the run go on, the counters begin at zero: nothing seems to have happened at once."""
    settings = make([*records(20), RUBBISH])
    _, first = run(settings)
    stream = settings.source.jsonl
    assert stream is not None
    with stream.path.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in records(28)[20:]))
    _, second = run(settings)
    before, after = first.board.read(), second.board.read()
    assert (before.records_trained, before.counts.records_trained) == (20, 20)
    assert (after.records_trained, after.counts.records_trained) == (28, 8)
    assert (before.counts.dead_letters, after.counts.dead_letters) == ({"not_json": 1}, {})
    assert after.counts.steps == after.step - before.step
    assert after.counts.tokens_trained == after.tokens_trained - before.tokens_trained
