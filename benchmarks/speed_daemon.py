"""The daemon's speed over that of bare training steps on the same batches.

The daemon reads the bundled sample from its file, decodes, batches, holds records out, notices and enters regimes,
scores, writes its journal and takes snapshots. Between its steps another learner takes bare ones on the same records,
so other load on the machine affects both alike.

Whoever sees the shapes of a batch first pays more: memory is mapped and, in bfloat16, kernels are compiled for them.
Two learners took the same batches one after the other, and the first was slower by 3 % in the median and 6 % in sum.
So the daemon is first with every other batch, and the bare steps with those between; what an earlier pass trained on
tells them which come next.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.measuring import SAMPLE
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon, Observer
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Learner, Step
from streamlearn.regimes.regime import ShiftReport
from streamlearn.settings import JsonlSettings, LogSettings, ProbeSettings, Settings, SourceSettings
from streamlearn.snapshot.parts import SnapshotInfo
from streamlearn.status import Board, Clock, Phase, Status
from streamlearn.stream.record import Batch, Example


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
    """Return the times of several passes, after one that only finds out what is trained on."""
    seen = _TrainedBatches()
    _pass(seen)
    return [_measured_pass(seen.batches) for _ in range(max(3, rounds // 2))]


def _measured_pass(batches: Sequence[Sequence[Example]]) -> DaemonPass:
    with tempfile.TemporaryDirectory() as folder:
        bare = Components(_settings(Path(folder)))
        steps = _BareSteps(bare.learner, batches)
        seconds, tokens = _pass(steps)
        bare.close()
    assert steps.tokens == tokens, "the daemon trains on the same records in each pass"
    return DaemonPass(tokens, daemon_s=seconds - steps.seconds, bare_s=steps.seconds)


def _pass(observer: Observer) -> tuple[float, int]:
    """Run the daemon over the sample; return the seconds, those of the observer included, and the tokens."""
    with tempfile.TemporaryDirectory() as folder:
        components = Components(_settings(Path(folder)))
        daemon = Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1), observer=observer)
        started = time.perf_counter()
        daemon.run()
        seconds = time.perf_counter() - started
        components.close()
    return seconds, components.state.tokens


class _Silent:
    """An observer that only overrides what it needs."""

    def on_start(self, status: Status) -> None:
        """Nothing to do."""

    def on_shift(self, report: ShiftReport) -> None:
        """Nothing to do."""

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Nothing to do."""


class _TrainedBatches(_Silent):
    """Keeps what the daemon trains on."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Example]] = []

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Keep the batch."""
        del step, status
        self.batches.append(batch.examples)


class _BareSteps(_Silent):
    """Takes bare steps on the same batches: after every other step of the daemon, its batch and the next."""

    def __init__(self, learner: Learner, batches: Sequence[Sequence[Example]]) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self._learner = learner
        self._due = list(zip_longest(batches[::2], batches[1::2]))
        self._daemon_is_first = True

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Take the two steps, or leave out a turn."""
        del batch, step, status
        if self._daemon_is_first:
            started = time.perf_counter()
            self.tokens += sum(self._learner.step(each).tokens for each in self._due.pop(0) if each is not None)
            self.seconds += time.perf_counter() - started
        self._daemon_is_first = not self._daemon_is_first


def _settings(folder: Path) -> Settings:
    return Settings(
        state=folder,
        source=SourceSettings(jsonl=JsonlSettings(path=SAMPLE)),
        probe=ProbeSettings(similarity_tokens=512),  # as configs/quickstart.yaml, for the same sample
        log=LogSettings(level="error"),
    )
