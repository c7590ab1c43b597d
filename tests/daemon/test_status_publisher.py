"""The published status: speed, counters, and one moment of the loop."""

from collections.abc import Callable

import pytest

from streamlearn.daemon.status_publisher import SPEED_WINDOW_S, ProcessCounter, Throughput
from streamlearn.settings import Settings
from streamlearn.status import AdaptationStatus, Phase, Status
from tests.daemon.test_daemon import RUBBISH, backbone, daemon_of, make, opened, records, run

__all__ = ["backbone", "make"]


def test_throughput_is_an_average_over_its_window() -> None:
    """Older steps are forgotten, a single one has no speed."""
    throughput = Throughput()
    assert throughput.update(0.0, 100) == 0.0
    assert throughput.update(2.0, 300) == pytest.approx(100.0)
    for second in range(3, 100):
        found = throughput.update(float(second), 300 + 10 * second)
    assert found == pytest.approx(10.0)
    assert len(throughput._marks) <= SPEED_WINDOW_S + 2


def test_throughput_begins_anew_after_a_rollback() -> None:
    """Tokens of steps that were taken back are no negative speed."""
    throughput = Throughput()
    throughput.update(0.0, 100_000)
    throughput.update(10.0, 110_000)
    assert throughput.update(12.0, 10_000) == 0.0
    assert throughput.update(14.0, 10_200) == pytest.approx(100.0)


def test_an_idle_daemon_has_no_speed_and_keeps_its_counts(make: Callable[..., Settings]) -> None:
    """Speed is of the phase, counts are of the run."""
    with opened(make([*records(9), RUBBISH])) as components:
        daemon = daemon_of(components)
        daemon.run()
        daemon._publish(Phase.IDLE, ready=True)
        status = daemon.board.read()
    assert (status.phase, status.ready, status.tokens_per_s) == (Phase.IDLE, True, 0.0)
    assert (status.records_trained, status.dead_letters) == (9, {"not_json": 1})
    assert status.snapshot is not None
    assert status.snapshot.step == status.step


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
