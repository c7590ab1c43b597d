"""A batch for the learner, with the regime of each record."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch


@dataclass(frozen=True)
class AssignedBatch:
    """A batch whose records are assigned to regimes."""

    batch: Batch
    slots: tuple[int, ...]
    """The slot of the regime of each of `batch.records`."""
    shifts: tuple[Shift, ...] = ()
    """Shifts to enter, in this order, before training on the batch."""
    after: MonitorState | None = field(default=None, compare=False, repr=False)
    """The monitor's state before it read the next batch; an argument for `Monitor.state`."""

    @property
    def moves_on(self) -> bool:
        """Whether the stream moves to another regime in the batch. A regime that is split goes on."""
        return any(shift.parent is None for shift in self.shifts)

    def without(self, indices: Collection[int]) -> tuple[Batch, tuple[int, ...]]:
        """Return the batch without the records at `indices`, and the slots of the remaining records."""
        kept = [i for i in range(len(self.slots)) if i not in indices]
        batch = replace(
            self.batch,
            records=tuple(self.batch.records[i] for i in kept),
            examples=tuple(self.batch.examples[i] for i in kept),
        )
        return batch, tuple(self.slots[i] for i in kept)
