"""The published speed, and that a status is one moment of the loop."""

from collections.abc import Callable

import pytest

from streamlearn.daemon.loop import Daemon, Throughput
from streamlearn.settings import Settings
from streamlearn.status import Phase
from tests.daemon.test_daemon import RUBBISH, backbone, daemon_of, make, opened, records, run

__all__ = ["backbone", "make"]


def test_throughput_is_an_average_over_its_window() -> None:
    """Older steps are forgotten, and one alone has no speed, nor do steps that a rollback took back."""
    throughput = Throughput()
    assert throughput.update(0.0, 100) == 0.0
    assert throughput.update(2.0, 300) == pytest.approx(100.0)
    for second in range(3, 100):
        speed = throughput.update(float(second), 300 + 10 * second)
    assert speed == pytest.approx(10.0)
    assert throughput.update(100.0, 200) == 0.0
    assert throughput.update(102.0, 400) == pytest.approx(100.0)


def test_a_restart_counts_only_what_it_does(make: Callable[..., Settings]) -> None:
    """The totals of the run continue, the counters begin at zero: nothing seems to have happened at once."""
    settings = make([*records(20), RUBBISH])
    _, first = run(settings)
    stream = settings.source.jsonl
    assert stream is not None
    with stream.path.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in records(28)[20:]))
    _, second = run(settings)
    before, after = first.board.read(), second.board.read()
    assert (before.records_trained, after.records_trained) == (20, 28)
    assert (counted(first, "records_trained_total"), counted(second, "records_trained_total")) == (20, 8)
    assert counted(first, "records_dead_lettered_total", reason="not_json") == 1
    assert counted(second, "records_dead_lettered_total", reason="not_json") == 0
    assert counted(second, "steps_total") == after.step - before.step
    assert counted(second, "step_seconds_count") >= after.step - before.step
    assert counted(second, "tokens_trained_total") == after.tokens_trained - before.tokens_trained


def counted(daemon: Daemon, name: str, **labels: str) -> float:
    """The value of a counter of the daemon's process."""
    return daemon.board.counters.registry.get_sample_value(f"streamlearn_{name}", labels) or 0.0


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
