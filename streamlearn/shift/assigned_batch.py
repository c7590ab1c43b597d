"""A batch for the learner, with the regime of each record."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import chain

from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example


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

    following: tuple[tuple[Batch, tuple[int, ...]], ...] = field(default=(), compare=False, repr=False)
    """The batches after it that had been read when it was decided, with the slots that their records had then. A later
    correction is not in them, nor what was read later: a replay need not read as far ahead."""

    @property
    def moves_on(self) -> bool:
        """Whether the stream moves to another regime in the batch. A regime that is split goes on."""
        return any(shift.parent is None for shift in self.shifts)

    def records_of(self, slot: int, first: int) -> list[tuple[int, Example]]:
        """Records of the regime in `slot` here and in `following`, with their ordinals; `first` is the first one's."""
        batches = chain([(self.batch, self.slots)], self.following)
        pairs = chain.from_iterable(zip(batch.examples, slots, strict=True) for batch, slots in batches)
        return [(first + index, example) for index, (example, own) in enumerate(pairs) if own == slot]

    def without(self, indices: Collection[int]) -> tuple[Batch, tuple[int, ...]]:
        """Return the batch without the records at `indices`, and the slots of the remaining records."""
        kept = [i for i in range(len(self.slots)) if i not in indices]
        batch = replace(
            self.batch,
            records=tuple(self.batch.records[i] for i in kept),
            examples=tuple(self.batch.examples[i] for i in kept),
        )
        return batch, tuple(self.slots[i] for i in kept)
