"""The daemon in this process, as the benchmarks run it."""

from streamlearn.board import Board, Clock
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon, Observer
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Step
from streamlearn.regimes.report import ShiftReport
from streamlearn.settings import Settings
from streamlearn.snapshot.parts import SnapshotInfo
from streamlearn.status import Phase, Status
from streamlearn.stream.record import Batch


class QuietObserver:
    """Base of observers that need some of the daemon's notices."""

    def on_start(self, status: Status) -> None: ...

    def on_step(self, batch: Batch, step: Step, status: Status) -> None: ...

    def on_shift(self, report: ShiftReport) -> None: ...

    def on_snapshot(self, info: SnapshotInfo) -> None: ...


def without_http() -> tuple[Board, JobQueue]:
    """Return what a daemon otherwise shares with its HTTP server."""
    return Board(Status(Phase.STARTING), Clock()), JobQueue(1)


def run_daemon(settings: Settings, observer: Observer) -> None:
    """Run the daemon over a stream that ends."""
    components = Components(settings)
    Daemon(components, *without_http(), observer=observer).run()
    components.close()
