"""No deadline, interval or order depends on the wall clock, which may jump at any time. Ruff finds its uses."""

import itertools
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, tzinfo
from typing import Any

import orjson
import pytest

from streamlearn.board import Board, Clock
from streamlearn.daemon import checkpoint as module
from streamlearn.daemon.loop import Daemon
from streamlearn.jobs.queue import JobQueue
from streamlearn.serve.models import JobsView, status_view
from streamlearn.settings import Settings
from streamlearn.status import Phase, Status
from tests.daemon.test_daemon import StopAfter, backbone, make, opened, records

__all__ = ["backbone", "make"]


DAY_S = 86_400.0
JUMPS = (DAY_S, -2 * DAY_S, -1e12, 5e9, 0.0)
"""A day forward, a day back, 1970 (clipped there), the next century, and correct again; seconds."""


class Jumping:
    """A wall clock that jumps at each reading."""

    def __init__(self) -> None:
        self._offsets: Iterator[float] = itertools.cycle(JUMPS)
        self.readings = 0

    def __call__(self) -> float:
        """The current reading."""
        self.readings += 1
        return max(1.0, time.monotonic() + 1.79e9 + next(self._offsets))


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> Jumping:
    """Replaces the clock of snapshots, and `time.time` everywhere."""
    wall = Jumping()

    class Day(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            assert tz is UTC
            return datetime.fromtimestamp(wall(), tz)

    monkeypatch.setattr(module, "datetime", Day)
    monkeypatch.setattr(time, "time", wall)
    return wall


def learn(settings: Settings, clock: Clock, *, stop_at: int = 0) -> tuple[Daemon, list[str]]:
    """One run of the daemon, with the names of its snapshots; the status is read after each step."""
    saved: list[str] = []
    board = Board(Status(Phase.STARTING, started_at=clock.wall()), clock)

    class StatusReader(StopAfter):
        """Reads everything that contains a time."""

        def on_step(self, batch: Any, step: Any, status: Status) -> None:
            status_view(board, JobsView(waiting=0, capacity=1), clock)
            assert board.why_not_alive() is None
            super().on_step(batch, step, status)

        def on_snapshot(self, info: Any) -> None:
            saved.append(info.name)

    with opened(settings) as components:
        observer = StatusReader(stop_at)
        observer.daemon = daemon = Daemon(components, board, JobQueue(1), observer=observer)
        daemon.run()
        assert [f"{components.learner.number:08d}"] == components.store.names()[-1:]
    return daemon, saved


def every_two_steps(settings: Settings) -> Settings:
    return settings.model_copy(
        update={"snapshot": settings.snapshot.model_copy(update={"every_records": 8, "keep": 2})}
    )


def tensors(settings: Settings) -> dict[str, bytes]:
    newest = max(path for path in (settings.state / "snapshots").iterdir() if path.name.isdecimal())
    return {
        str(path.relative_to(newest)): path.read_bytes() for path in newest.rglob("*.safetensors") if path.is_file()
    }


def test_a_wall_clock_that_jumps_changes_nothing(make: Callable[..., Settings], jumping: Jumping) -> None:
    """Ten steps in two runs: snapshots are on schedule, the newest by step are kept, and the weights are bit-equal."""
    wild, calm = (every_two_steps(make(records(40), name)) for name in ("wild", "calm"))
    daemon, saved = learn(wild, Clock(wall=jumping), stop_at=5)
    assert saved == ["00000000", "00000002", "00000004", "00000005"]
    daemon, saved = learn(wild, Clock(wall=jumping))
    assert saved == ["00000007", "00000009", "00000010"]
    assert sorted(path.name for path in (wild.state / "snapshots").iterdir()) == ["00000009", "00000010"]
    created = [
        orjson.loads((path / "manifest.json").read_bytes())["created_at"]
        for path in sorted((wild.state / "snapshots").iterdir())
    ]
    assert len(set(created)) == 2
    (row,) = daemon.state.ledger.rows()
    assert row[2] + row[4] == 40
    assert jumping.readings > 3 * len(JUMPS)
    learn(calm, Clock(wall=lambda: 1.79e9), stop_at=5)
    learn(calm, Clock(wall=lambda: 1.79e9))
    assert tensors(wild) == tensors(calm)


def test_a_snapshot_is_due_by_the_monotonic_clock(make: Callable[..., Settings], jumping: Jumping) -> None:
    """A day that passes only on the wall clock makes none due; 300 s on the monotonic clock make one due."""
    calm = make(records(4))
    calm = calm.model_copy(update={"snapshot": calm.snapshot.model_copy(update={"every_records": 10_000})})
    now = 0.0
    with opened(calm, clock=lambda: now) as components:
        daemon = Daemon(components, Board(Status(Phase.STARTING), Clock(wall=jumping)), JobQueue(1))
        daemon.state.records_since_save = 4
        for _ in JUMPS:
            daemon.save_if_due()
        assert components.store.names() == []
        now = calm.snapshot.every_s
        daemon.save_if_due()
        assert components.store.names() == ["00000000"]
