"""A daemon that learns task after task, with what it costs at growing numbers of regimes.

At each checkpoint, over `WINDOW` batches, each of one regime and without the probe of a new one:

- the step's time, beside that of a learner with one regime on the same batch, taken in turns;
- the time of everything else that the loop does with a record: reading, decoding, detection, journal;
- the process's memory, and a snapshot like any other: the second one before it was written a batch earlier.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.measuring import resident_mib
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.daemon.model import adapter_of
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Learner, Step
from streamlearn.settings import Settings
from streamlearn.shift.monitor import AssignedBatch
from streamlearn.status import Board, Clock, Phase, Status

WINDOW = 24
"""Batches that a checkpoint looks at."""
NEAR = 4 * WINDOW
"""Batches before the end of the stream from which on it is measured."""
SNAPSHOTS = 3
"""Snapshots in a row at a checkpoint, after a batch each; the last one is measured."""


@dataclass(frozen=True)
class RegimeCosts:
    """What is measured at one number of regimes."""

    regimes: int
    in_memory: int
    """Adapters in memory."""
    records: int
    tokens_per_s: float
    """Median over the batches of the window."""
    step_over_one_regime: float
    """Ratio to the median of a learner with one regime on the same batches."""
    other_ms_per_record: float
    """Everything but the step."""
    memory_mib: float
    """Resident memory of the process, that of the learner with one regime included."""
    snapshot_mib: float
    """Size of a snapshot."""
    new_mib: float
    """What of it was written; the rest is linked."""
    snapshot_s: float

    def to_json(self) -> dict[str, Any]:
        """Rounded figures."""
        digits = {"tokens_per_s": 0, "memory_mib": 0, "snapshot_mib": 1, "new_mib": 1}
        return {key: round(value, digits.get(key, 3)) for key, value in asdict(self).items()}


@dataclass
class _BatchCosts:
    """The costs of one batch."""

    records: int
    speed: float
    """Of the step, tokens per second."""
    reference_speed: float
    other_s: float


class MeasuredDaemon(Daemon):
    """The daemon in this process, with a learner of one regime beside it."""

    def __init__(self, settings: Settings, wanted: Sequence[int], records: int) -> None:
        """Open the daemon.

        Args:
            settings: Its configuration.
            wanted: The numbers of regimes to measure at, ascending.
            records: Length of the stream; at its end it is measured once more.
        """
        super().__init__(Components(settings), Board(Status(Phase.STARTING), Clock()), JobQueue(1))
        self.checkpoints: list[RegimeCosts] = []
        self.regimes: list[int] = []
        """Number of the regime of each record."""
        self._wanted = [*wanted, settings.shift.max_regimes + 1]
        self._last = records - NEAR * settings.stream.batch_records
        self._window: list[_BatchCosts] = []
        self._saves = 0
        self._turn = False
        self._reference = _with_one_regime(self.components.settings)
        self._ended = time.perf_counter()

    def learn(self, assigned: AssignedBatch) -> Step | None:
        """Train on a batch, and near a checkpoint the learner of one regime as well: before or after it, in turns."""
        near = len(self.adaptation.numbers) >= self._wanted[0] - WINDOW // 2 or self.state.records >= self._last
        step = self._compare(assigned) if near else super().learn(assigned)
        self.regimes += [self.adaptation.numbers[slot] for slot in assigned.slots]
        if len(self._window) >= WINDOW and self._is_due():
            self.save()
            self._saves += 1
            if self._saves == SNAPSHOTS:
                self._checkpoint()
        self._ended = time.perf_counter()
        return step

    def _compare(self, assigned: AssignedBatch) -> Step | None:
        examples, alone = assigned.batch.examples, [0] * len(assigned.slots)
        self._turn = not self._turn
        other_s = time.perf_counter() - self._ended
        reference = self._reference.step(examples, alone) if self._turn else None
        began = time.perf_counter()
        step = super().learn(assigned)
        seconds = time.perf_counter() - began
        reference = reference or self._reference.step(examples, alone)
        if step is not None and not assigned.shifts and len(set(assigned.slots)) == 1:
            costs = _BatchCosts(
                len(examples),
                step.tokens / step.seconds,
                reference.tokens / reference.seconds,
                other_s + seconds - step.seconds,
            )
            self._window = [*self._window[1 - WINDOW :], costs]
        return step

    def _is_due(self) -> bool:
        """Whether the next wanted number is reached, or the end of the stream is near."""
        at_end = self.state.records >= self._last + NEAR // 2 * self.components.settings.stream.batch_records
        return len(self.adaptation.numbers) >= self._wanted[0] or at_end

    def _checkpoint(self) -> None:
        store, window = self.components.store, self._window
        speed = median(each.speed for each in window)
        self.checkpoints.append(
            RegimeCosts(
                regimes=len(self.adaptation.numbers),
                in_memory=self.learner.cache.num_in_memory,
                records=self.state.records,
                tokens_per_s=speed,
                step_over_one_regime=speed / median(each.reference_speed for each in window),
                other_ms_per_record=1e3 * median(each.other_s / each.records for each in window),
                memory_mib=resident_mib(),
                snapshot_mib=store.infos()[-1].bytes / 2**20,
                new_mib=store.new_bytes / 2**20,
                snapshot_s=written.write_seconds or 0.0 if (written := self.state.last_snapshot) is not None else 0.0,
            )
        )
        if len(self._wanted) > 1:
            self._wanted.pop(0)
        self._saves, self._window = 0, []


def _with_one_regime(settings: Settings) -> Learner:
    backbone = load(settings.backbone, outline(settings.backbone))
    peft = attach(backbone.model, adapter_of(settings), settings.seed)
    return Learner(peft, settings.learner, backbone.device)
