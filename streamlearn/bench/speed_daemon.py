"""The daemon's speed over that of bare training steps on the same batches.

The daemon reads the bundled sample from its file, decodes, batches, holds records out, notices and enters regimes,
scores, writes its journal and takes snapshots. After each of its steps another learner takes a bare one on the same
records, so other load on the machine affects both alike.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from streamlearn.adaptation.shift_report import ShiftReport
from streamlearn.bench.sample import SAMPLE
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Learner, Step
from streamlearn.runtime.components import Components
from streamlearn.runtime.daemon import Daemon
from streamlearn.settings import JsonlSettings, LogSettings, Settings, SourceSettings
from streamlearn.snapshot.snapshot import SnapshotInfo
from streamlearn.status.board import Board, Clock
from streamlearn.status.status import Phase, Status
from streamlearn.stream.batch import Batch


@dataclass(frozen=True)
class DaemonPass:
    """One pass of the daemon over the bundled sample; its time is without start-up and with the final snapshot."""

    tokens: int
    """Trained on, by the daemon and by the bare steps."""
    daemon_s: float
    bare_s: float

    @property
    def over_bare(self) -> float:
        """Speed of the daemon over that of the bare steps."""
        return self.bare_s / self.daemon_s


def daemon_passes(rounds: int) -> list[DaemonPass]:
    """Return the times of several passes."""
    return [_daemon_pass() for _ in range(max(3, rounds // 2))]


def _daemon_pass() -> DaemonPass:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        components, bare = Components(_settings(Path(folder))), Components(_settings(Path(other)))
        steps = _BareSteps(bare.learner)
        daemon = Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1), observer=steps)
        started = time.perf_counter()
        daemon.run()
        seconds = time.perf_counter() - started
        tokens = components.state.tokens
        components.close()
        bare.close()
    return DaemonPass(tokens, daemon_s=seconds - steps.seconds, bare_s=steps.seconds)


class _BareSteps:
    """An observer of the daemon that takes a bare step after each of its steps."""

    def __init__(self, learner: Learner) -> None:
        self.seconds = 0.0
        self._learner = learner

    def on_start(self, status: Status) -> None:
        """Nothing to do."""

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Take a step on the records that the daemon has trained on."""
        del status
        started = time.perf_counter()
        own = self._learner.step(batch.examples)
        self.seconds += time.perf_counter() - started
        assert own.tokens == step.tokens

    def on_shift(self, report: ShiftReport) -> None:
        """Nothing to do."""

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Nothing to do."""


def _settings(folder: Path) -> Settings:
    return Settings(
        state=folder,
        source=SourceSettings(jsonl=JsonlSettings(path=SAMPLE)),
        log=LogSettings(level="error"),
    )
