"""The published speed, and that a status is one moment of the loop."""

from collections.abc import Callable

import pytest

from streamlearn.daemon.status_publisher import SPEED_WINDOW_S, Throughput
from streamlearn.settings import Settings
from streamlearn.status import Phase
from tests.daemon.test_daemon import RUBBISH, backbone, daemon_of, make, opened, records

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
