"""The look-ahead buffer: batches between the reader and the learner, in order.

A batch is in one of two states:

    undecided   fewer than `lookahead_records` records follow. The slots of its records may still be corrected, and a
                shift may still be attached to it.
    decided     its slots and shifts are final. It is the next to be trained on, or waits until the new regime that
                begins in it has the tokens needed for its probe.

A flush decides every batch, and none waits for its probe. A shift that is found later, although it begins in a flushed
batch, is attached to the first batch after it.

A snapshot covers the batches up to the last one trained on. Later batches are read and decided again after a restart,
in the same way, so the buffer is not saved. Only the slots of the batches that stayed undecided when the last one had
been read are: they influenced later decisions, so they are put back, decided again and dropped.
A shift that is found again and begins in one of them was entered, and is dropped too.

When something in a batch is refused, that batch and those after it are read again from the state before it. What was
entered before is found again as it was and dropped, since nothing that it was found from is refused (`entered_until`).
Another shift may then be found sooner than before, and begin in a batch that was trained on without it. It is attached
to the first batch that is read again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile

from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.detector_state import DetectorState
from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example


@dataclass
class HeldBatch:
    """An undecided batch. `Monitor` fills in its slots."""

    batch: Batch | None
    """None for a batch that was trained on before the restart."""
    first: int
    """Ordinal of its first record."""
    slots: list[int] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)
    after: MonitorState | None = None
    """The monitor's state after it read this batch, decided what it could, and before it read the next."""

    @property
    def end(self) -> int:
        """Ordinal after its last record."""
        return self.first + len(self.slots)


class Lookahead:
    """The buffer. The monitor fills and corrects it, and the loop takes batches from it."""

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self._undecided: deque[HeldBatch] = deque()
        self._decided: deque[AssignedBatch] = deque()
        self._taken: AssignedBatch | None = None
        self._entered: list[Shift] = []
        """Shifts of the batches before the one taken last that reading on from them finds again."""
        self._after_refusal = False
        self._flushed = False

    def __len__(self) -> int:
        """Number of batches that are decided and not yet taken."""
        return len(self._decided)

    def append(self, held: HeldBatch) -> None:
        """Add the newest batch, before its slots are known. After a flush, every batch must have been taken."""
        assert not (self._flushed and self._decided), "a probe would see later records than its replay does"
        self._flushed = False
        self._undecided.append(held)

    @property
    def waiting(self) -> list[Batch]:
        """The batches that were read and not yet taken, in order."""
        undecided = [held.batch for held in self._undecided if held.batch is not None]
        return [*(assigned.batch for assigned in self._decided), *undecided]

    @property
    def is_flushed(self) -> bool:
        """Whether all that was read is decided, without waiting for more records."""
        return self._flushed

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Slots of the undecided batches, by batch."""
        return tuple(tuple(held.slots) for held in self._undecided)

    @property
    def protected(self) -> set[int]:
        """Slots that occur in undecided batches. Their regimes must not be dropped to make room."""
        return {slot for held in self._undecided for slot in held.slots}

    def correct(self, ordinal: int, slot: int) -> None:
        """Change the slot of a record, if its batch is undecided."""
        for held in self._undecided:
            if held.first <= ordinal < held.end:
                held.slots[ordinal - held.first] = slot

    def attach(self, shift: Shift) -> None:
        """Attach a shift to the batch with its onset, or to the oldest undecided batch if that one is decided.

        One that was entered is dropped, and one that was not is never attached to a batch that was trained on, see the
        module.
        """
        if self._was_entered(shift):
            return
        holder = next((held for held in self._undecided if held.end > shift.onset), self._undecided[-1])
        if holder.batch is None and not self._after_refusal:
            self._entered.append(shift)
        elif holder.batch is None:
            holder = next(held for held in self._undecided if held.batch is not None)
        holder.shifts.append(shift)

    def decide(self, detector: DetectorState) -> list[AssignedBatch]:
        """Decide every batch that is followed by enough records, and return the batches decided now.

        `detector` is the detector's state after it read the newest batch.
        """
        return self._decide(self._num_records, detector)

    def flush(self, detector: DetectorState) -> list[AssignedBatch]:
        """Decide the remaining batches. Until the next batch is added, none waits for a probe."""
        self._flushed = True
        return self._decide(0, detector)

    def take(self, probe_tokens: Callable[[Shift], int] = lambda _: 0) -> AssignedBatch | None:
        """Take the oldest decided batch; None if there is none, or if the regime that begins in it lacks tokens.

        `probe_tokens` returns the number of tokens that the probe of a shift needs, 0 for no probe.
        """
        if not self._decided or not (self._flushed or self._can_probe(probe_tokens)):
            return None
        if self._taken is not None and self._taken.after is not None:
            last, shifts = self._taken.after.detector.ordinal, [*self._entered, *self._taken.shifts]
            self._entered = [shift for shift in shifts if shift.declared_at > last]
        self._taken = self._decided.popleft()
        return self._taken

    def examples(self, slot: int) -> list[Example]:
        """Records of the regime in `slot` from the batch taken last until the stream moves on, for its probe."""
        taken = () if self._taken is None else (self._taken,)
        return _examples(chain(taken, takewhile(lambda later: not later.moves_on, self._decided)), slot)

    @property
    def entered_until(self) -> int:
        """Ordinal up to which nothing may be refused in the batch taken last or after it.

        Up to there reading on from the batch before finds again what was entered, and must find it unchanged.
        """
        return max((shift.declared_at for shift in self._entered), default=0)

    def restart(self, held: Sequence[HeldBatch] = (), *, after_refusal: bool = False) -> None:
        """Replace all batches by the undecided ones of a saved state, after a rollback or a restart.

        `after_refusal` says that it is the state before the batch taken last, in which something was refused.
        """
        if not after_refusal:
            self._entered.clear()
        self._after_refusal = after_refusal
        self._undecided = deque(held)
        self._decided.clear()
        self._taken = None
        self._flushed = False

    def _decide(self, records_after: int, detector: DetectorState) -> list[AssignedBatch]:
        if not self._undecided:
            return []
        newest, due = self._undecided[-1], []
        while self._undecided and newest.end - self._undecided[0].end >= records_after:
            due.append(self._undecided.popleft())
        newest.after = MonitorState(detector, self.slots)
        rest = [*due, *self._undecided]
        decided = [
            AssignedBatch(held.batch, tuple(held.slots), tuple(held.shifts), held.after, _following(rest[place:]))
            for place, held in enumerate(due, start=1)
            if held.batch is not None
        ]
        self._decided.extend(decided)
        return decided

    def _was_entered(self, shift: Shift) -> bool:
        found = next((entered for entered in self._entered if entered.number == shift.number), None)
        assert found is None or found == shift, "what was entered is found again as it was"
        return found is not None

    def _can_probe(self, probe_tokens: Callable[[Shift], int]) -> bool:
        oldest = self._decided[0]
        probed = [shift for shift in oldest.shifts if probe_tokens(shift) > 0]
        if not probed or any(later.moves_on for later in islice(self._decided, 1, None)):
            return True  # no more records of this regime will follow in this segment
        tokens = sum(map(len, _examples(self._decided, probed[-1].slot)))
        return tokens >= probe_tokens(probed[-1])


def _following(later: Iterable[HeldBatch]) -> tuple[tuple[Batch, tuple[int, ...]], ...]:
    return tuple((held.batch, tuple(held.slots)) for held in later if held.batch is not None)


def _examples(batches: Iterable[AssignedBatch], slot: int) -> list[Example]:
    return [
        example
        for assigned in batches
        for example, example_slot in zip(assigned.batch.examples, assigned.slots, strict=True)
        if example_slot == slot
    ]
