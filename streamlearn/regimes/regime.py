"""A regime: everything that is kept about it besides its adapter and its input profile. And all that is saved."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from streamlearn.codec import NOT_SAVED
from streamlearn.regimes.holdout import KeptRecord, Reservoir, ScoreHistory
from streamlearn.regimes.report import ShiftReport
from streamlearn.shift.detector import Shift
from streamlearn.shift.drift import LossLevels
from streamlearn.shift.monitor import MonitorState
from streamlearn.status import RegimeStatus, SliceScore

NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9 ._:/+-]{0,62}[A-Za-z0-9._:/+-])?")
"""Begins with a letter, so that no name is taken for a number."""
NUM_LOSSES = 32
"""Losses kept per regime. Older ones come from before the adapter had learned what it knows now."""


@dataclass
class Regime:
    """A regime that has been entered. Its profile is the monitor's, which reads ahead of training."""

    number: int
    """Unique; never reused."""
    slot: int
    """Where its adapter and its profile are; reused after the regime is forgotten."""
    name: str = ""
    """For people; empty without one."""
    frozen_from: list[int] = field(default_factory=list)
    """Records that had been read when the regime was frozen, unfrozen, frozen again and so on."""
    approved_at: int | None = None
    """Step at which an operator let it be published although its answers changed."""
    refused_return: int | None = None
    """Number of the regime that its first records looked like, see `ShiftReport`."""
    visits: int = 0
    """Segments of the stream in it."""
    records: int = 0
    first_record: int | None = None
    last_record: int | None = None
    probed: list[KeptRecord] = field(default_factory=list)
    """First records, which it was probed with, until its first segment ends; empty if the probe failed."""
    holdouts: Reservoir = field(default_factory=Reservoir)
    rehearsal: Reservoir = field(default_factory=Reservoir)
    """Records that it was trained on, for `learner.rehearsal`; empty without it."""
    scores: ScoreHistory = field(default_factory=ScoreHistory)
    losses: list[float] = field(default_factory=list)
    """Losses of its newest records before each was trained on, nats per learned token; oldest first."""
    canaries: tuple[SliceScore, ...] = field(default=(), metadata=NOT_SAVED)
    """Newest scores on the canaries."""
    canaries_at: int = field(default=-1, metadata=NOT_SAVED)
    """Step of the snapshot whose weights were scored; -1: none was."""
    status: RegimeStatus | None = field(default=None, metadata=NOT_SAVED)
    """As it was published last; None after a change."""

    @property
    def is_frozen(self) -> bool:
        """Whether records that are read from now on are measured and not trained on."""
        return len(self.frozen_from) % 2 == 1

    def was_frozen(self, ordinal: int) -> bool:
        """Whether the regime was frozen when the record was first read.

        A frozen regime keeps its slot: it is neither dropped nor merged when a new regime needs one. Decisions about
        slots are made when a record is read, ahead of training, and repeated when it is read again after a restart.
        """
        return bisect_left(self.frozen_from, ordinal) % 2 == 1

    def set_frozen(self, is_frozen: bool, *, read: int, trained: int) -> bool:
        """Freeze or unfreeze; return whether that is a change.

        Args:
            is_frozen: Whether it is frozen from now on.
            read: Records read so far, those ahead of training among them.
            trained: Records that are done and will not be read again.
        """
        is_change = self.is_frozen != is_frozen
        if is_change:
            self.frozen_from.append(read)
        while len(self.frozen_from) > 1 and self.frozen_from[1] <= trained:
            del self.frozen_from[:2]
        return is_change

    def count(self, ordinal: int) -> None:
        """Count a record that is done."""
        self.records += 1
        self.first_record = self.first_record or ordinal
        self.last_record = ordinal
        self.status = None

    def forget_records(self) -> None:
        """Discard losses, records and scores: the regime's answers changed, and the newest are right."""
        self.losses, self.scores, self.status = [], ScoreHistory(), None
        self.holdouts, self.rehearsal, self.probed = Reservoir(), Reservoir(), []

    def describe(self, *, is_current: bool, prequential_loss: float | None) -> RegimeStatus:
        """The regime as it is published."""
        scores = self.scores
        return RegimeStatus(
            number=self.number,
            slot=self.slot,
            name=self.name,
            frozen=self.is_frozen,
            current=is_current,
            visits=self.visits,
            records=self.records,
            first_record=self.first_record,
            last_record=self.last_record,
            prequential_loss=prequential_loss,
            holdout_records=len(self.holdouts.records),
            rehearsal_records=len(self.rehearsal.records),
            history=tuple(scores.points),
            best_accuracy=scores.best_accuracy,
            end_accuracy=scores.at_end.accuracy if scores.at_end is not None else None,
            canaries=self.canaries,
            canaries_step=self.canaries_at if self.canaries else None,
        )


@dataclass
class RegimesState:
    """All that a snapshot has about regimes, besides adapters and hooks."""

    regimes: dict[int, Regime] = field(default_factory=dict)
    """By slot, those that were entered and are remembered."""
    current: int | None = None
    """Slot of the segment that is being trained on; None before the first, and after its regime was dropped."""
    records: int = 0
    """Ordinal of the last record that was trained on, held out or only measured."""
    num_changes: int = 0
    """Changes by the operator, ever. A snapshot of the same step with another number is another state."""
    num_entries: Counter[str] = field(default_factory=Counter)
    """Shifts by kind, the entry into the first regime among them."""
    reports: list[ShiftReport] = field(default_factory=list)
    """The newest shifts, oldest first."""
    suspected: list[Shift] = field(default_factory=list)
    """Shifts of the answers that wait for confirmation, in the order of their alarms."""
    undivided: list[Shift] = field(default_factory=list)
    """Splits whose regimes' records are not divided yet."""
    start_losses: list[dict[str, float]] = field(default_factory=list)
    """See `Fallback`."""
    monitor: MonitorState = field(default_factory=MonitorState)
    """The monitor's state as of the last trained batch."""
    answers: LossLevels = field(default_factory=LossLevels)
    """The state of the detector of changed answers."""


def slot_of(regimes: Mapping[int, Regime], number: int | None) -> int | None:
    """Slot of the regime with this number; None if it is not remembered."""
    return next((slot for slot, regime in regimes.items() if regime.number == number), None)
