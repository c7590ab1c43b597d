"""What the loop hands over after each batch."""

from dataclasses import dataclass

from streamlearn.errors import Reason
from streamlearn.learner.step import Step
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch, DeadLetteredRecord
from streamlearn.stream.record import RecordId


@dataclass(frozen=True)
class BatchOutcome:
    """One batch that is done."""

    batch: Batch
    """With the records that were held out."""
    shifts: tuple[Shift, ...]
    """Those that were entered before it."""
    regimes: tuple[int | None, ...]
    """Number of each record's regime; None if it is no longer remembered."""
    last_record: int
    """Ordinal of its last record."""
    number: int
    """Of its step; a batch of which no record is trained on has one too."""
    step: Step | None
    """None when no record of it was trained on."""
    refused: tuple[RecordId, ...] = ()
    """Records whose update was refused."""

    @property
    def first_record(self) -> int:
        """Ordinal of its first record."""
        return self.last_record - len(self.regimes) + 1

    @property
    def moves(self) -> tuple[Shift, ...]:
        """Shifts by which the stream moved to another regime. One that is split from another begins no segment."""
        return tuple(shift for shift in self.shifts if shift.parent is None)

    @property
    def dead_lettered(self) -> tuple[DeadLetteredRecord, ...]:
        """Its unusable records, and those of a refused update."""
        if self.step is None or self.step.refusal is None:
            return self.batch.dead_lettered
        message = refusal_message(self.step)
        refused = (DeadLetteredRecord(record, Reason.NOT_FINITE_UPDATE, message) for record in self.refused)
        return (*self.batch.dead_lettered, *refused)


def refusal_message(step: Step) -> str:
    """Why the records of a refused update are dead letters."""
    return f"the update of step {step.number} was refused: {step.refusal}"
