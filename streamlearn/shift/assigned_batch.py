"""A batch on its way to the learner, its records' regimes decided."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from streamlearn.shift.shift import Shift
from streamlearn.shift.state_arrays import Memory
from streamlearn.stream.batch import Batch


@dataclass(frozen=True)
class AssignedBatch:
    """A batch whose records' regimes are decided."""

    batch: Batch
    slots: tuple[int, ...]
    """The regime's slot of each of `batch.records`."""
    shifts: tuple[Shift, ...] = ()
    """To be entered, in this order, before the batch is trained on."""
    after: Memory | None = field(default=None, compare=False, repr=False)
    """The monitor when it had looked at this batch and at none later; what `Monitor.state` is given."""

    def without(self, indices: Collection[int]) -> tuple[Batch, tuple[int, ...]]:
        """The batch less some of its records, and the slots of the others."""
        kept = [i for i in range(len(self.slots)) if i not in indices]
        batch = replace(
            self.batch,
            records=tuple(self.batch.records[i] for i in kept),
            examples=tuple(self.batch.examples[i] for i in kept),
        )
        return batch, tuple(self.slots[i] for i in kept)
