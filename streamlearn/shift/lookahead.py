"""Batches between the reader and the learner, in order.

    undecided   fewer than `lookahead_records` records follow: the regimes of its records may still be corrected, and a
                shift may still be found to begin in it
    decided     its regimes are final; it leaves next, or waits until the new regime that begins in it has the tokens
                that its probe is trained on

A snapshot names the last batch that was trained on. Batches after it are read again after a restart and decided again
in the same way, so nothing of this line is saved but the slots of undecided batches that had already left when that one
was decided: they took part in its decisions and leave a second time without being returned.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile

from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.shift import Shift
from streamlearn.shift.state_arrays import Memory
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example


@dataclass
class HeldBatch:
    """An undecided batch; `batch` is None for one that left before the restart."""

    batch: Batch | None
    first: int
    """Ordinal of its first record."""
    slots: list[int] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)
    after: Memory | None = None
    """The monitor's state right after this batch."""

    @property
    def end(self) -> int:
        """Ordinal after its last record."""
        return self.first + len(self.slots)


class Lookahead:
    """The line of batches. The monitor fills and corrects it, the loop takes from it."""

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self._undecided: deque[HeldBatch] = deque()
        self._decided: deque[AssignedBatch] = deque()
        self._taken: AssignedBatch | None = None
        self._ended = False

    def __len__(self) -> int:
        """Batches that are decided and not taken."""
        return len(self._decided)

    def append(self, held: HeldBatch) -> None:
        """Add the newest batch; its slots are filled in afterwards."""
        self._undecided.append(held)

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Slots of the undecided batches, by batch."""
        return tuple(tuple(held.slots) for held in self._undecided)

    @property
    def protected(self) -> set[int]:
        """Regimes that occur among the undecided batches: none of them may be dropped to make room."""
        return {slot for held in self._undecided for slot in held.slots}

    def correct(self, ordinal: int, slot: int) -> None:
        """Reassign an undecided record."""
        for held in self._undecided:
            if held.first <= ordinal < held.end:
                held.slots[ordinal - held.first] = slot

    def attach(self, shift: Shift) -> None:
        """Give a shift to the batch with its onset, or to the oldest undecided one when that has left."""
        holder = next((held for held in self._undecided if held.end > shift.onset), self._undecided[-1])
        holder.shifts.append(shift)

    def decide(self) -> list[AssignedBatch]:
        """Decide every batch that enough records follow; return those decided now."""
        return self._decide(self._num_records)

    def finish(self) -> list[AssignedBatch]:
        """Decide the rest, at the end of a finite stream; from then on no batch waits for its probe."""
        self._ended = True
        return self._decide(0)

    def take(self, probe_tokens: Callable[[Shift], int] = lambda _: 0) -> AssignedBatch | None:
        """The oldest decided batch; None while there is none, or while the regime that begins in it lacks tokens.

        `probe_tokens` gives the tokens that a shift's probe is trained on, 0 where there is none.
        """
        if not self._decided or not (self._ended or self._can_probe(probe_tokens)):
            return None
        self._taken = self._decided.popleft()
        return self._taken

    def examples(self, slot: int) -> list[Example]:
        """Records of the regime in `slot` from the batch taken last up to the next shift: what its probe sees."""
        taken = () if self._taken is None else (self._taken,)
        return _examples(chain(taken, takewhile(lambda later: not later.shifts, self._decided)), slot)

    def restart(self, held: Sequence[HeldBatch] = ()) -> None:
        """Drop every batch, after a rollback or a restart; `held` left before and are still undecided."""
        self._undecided = deque(held)
        self._decided.clear()
        self._taken = None
        self._ended = False

    def _decide(self, records_after: int) -> list[AssignedBatch]:
        decided = []
        while self._undecided and self._undecided[-1].end - self._undecided[0].end >= records_after:
            held = self._undecided.popleft()
            if held.batch is not None:
                decided.append(AssignedBatch(held.batch, tuple(held.slots), tuple(held.shifts), held.after))
        self._decided.extend(decided)
        return decided

    def _can_probe(self, probe_tokens: Callable[[Shift], int]) -> bool:
        oldest = self._decided[0]
        probed = [shift for shift in oldest.shifts if probe_tokens(shift) > 0]
        if not probed or any(later.shifts for later in islice(self._decided, 1, None)):
            return True  # no more records of this regime will come
        tokens = sum(map(len, _examples(self._decided, probed[-1].slot)))
        return tokens >= probe_tokens(probed[-1])


def _examples(batches: Iterable[AssignedBatch], slot: int) -> list[Example]:
    return [
        example
        for assigned in batches
        for example, its_slot in zip(assigned.batch.examples, assigned.slots, strict=True)
        if its_slot == slot
    ]
