"""The room's door: every record once, in order, ahead of the learner.

The last `lookahead_records` records are held back, so that a shift is declared before its first record is trained on.
A batch leaves once so many records came after it. What a restart restores is the state as it was when the last batch
that left had just been looked at, so that the batches behind it, fed again, meet the same decisions. Batches that were
still held at that time are part of it, as *ghosts*: they take up the shifts and the corrections that they took up the
first time, and leave unseen.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import ShiftSettings
from streamlearn.shift import state_arrays as memory
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.featurizer import Featurizer, input_of
from streamlearn.shift.input_shift_detector import DetectorState, InputShiftDetector
from streamlearn.shift.regime_memory import RegimeMemory, RegimeSummary
from streamlearn.shift.shift import Shift
from streamlearn.shift.state_arrays import Memory
from streamlearn.stream.batch import Batch


@dataclass
class _Held:
    """A batch in the line; a ghost has none."""

    batch: Batch | None
    first: int
    slots: list[int]
    shifts: list[Shift] = field(default_factory=list)
    saved: DetectorState | None = None
    ghosts: tuple[tuple[int, ...], ...] = ()
    """Slots of the batches in the line when this one had been looked at, itself the last."""

    @property
    def end(self) -> int:
        """Ordinal behind its last record."""
        return self.first + len(self.slots)


class Monitor:
    """Sees each record once, in order, ahead of the learner."""

    def __init__(
        self, settings: ShiftSettings, vocab_size: int, seed: int, *, watch: InputShiftDetector | None = None
    ) -> None:
        assert vocab_size > 0
        self._settings = settings
        self._featurizer = Featurizer(seed)
        self._watch = watch or InputShiftDetector(settings)
        self._line: deque[_Held] = deque()
        self._released: Memory = (self._watch.save(), ())

    def update(self, batch: Batch) -> list[AssignedBatch]:
        """Take the next batch; return those that are now decided, in order: none, one or several."""
        held = _Held(batch, self._watch.ordinal + 1, [])
        self._line.append(held)
        for example in batch.examples:
            protected = {slot for each in self._line for slot in each.slots}
            verdict = self._watch.update(self._featurizer.featurize(input_of(example)), protected)
            held.slots.append(verdict.slot)
            for ordinal, slot in verdict.moved:
                self._correct(ordinal, slot)
            if verdict.shift is not None:
                self._attach(verdict.shift)
        held.saved = self._watch.save()
        held.ghosts = tuple(tuple(each.slots) for each in self._line)
        return self._release(self._settings.lookahead_records)

    def flush(self) -> list[AssignedBatch]:
        """Return what is held back, at the end of a finite stream."""
        return self._release(0)

    @property
    def released(self) -> Memory:
        """The monitor when it had looked at the last batch that left, and at none later."""
        return self._released

    def assign(self, inputs: Sequence[NDArray[np.int32]], as_of: Memory | None = None) -> list[int]:
        """The slot of the regime that each input belongs to most likely, each by itself; 0 before the first record.

        `as_of` is `released` or a batch's `AssignedBatch.after`: the state to assign by.
        """
        regimes = self._watch.regimes if as_of is None else self._as_of(as_of)
        if not len(regimes):
            return [0] * len(inputs)
        return regimes.assign(self._featurizer.featurize(ids) for ids in inputs)

    def regimes(self) -> tuple[RegimeSummary, ...]:
        """What is remembered, by slot."""
        return self._watch.regimes.views()

    def state(self, as_of: Memory | None = None) -> dict[str, NDArray[np.generic]]:
        """What a snapshot keeps, as of `released` unless another moment is given."""
        saved, ghosts = self._released if as_of is None else as_of
        return memory.to_arrays(saved, ghosts)

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Become what `state` told; the next batch to look at is the one after the last released."""
        saved, ghosts = memory.from_arrays(arrays)
        self._watch.load(saved)
        self._released = saved, ghosts
        self._line.clear()
        first = saved.ordinal + 1 - sum(map(len, ghosts))
        for slots in ghosts:
            self._line.append(_Held(None, first, list(slots)))
            first += len(slots)

    def _as_of(self, then: Memory) -> RegimeMemory:
        saved, _ = then
        regimes = RegimeMemory(self._settings.max_regimes)
        regimes.thaw(saved.regimes, saved.next_number)
        return regimes

    def _correct(self, ordinal: int, slot: int) -> None:
        for each in self._line:
            if each.first <= ordinal < each.end:
                each.slots[ordinal - each.first] = slot

    def _attach(self, shift: Shift) -> None:
        """To the batch that holds its onset, or the oldest one that is still here."""
        holder = next((each for each in self._line if each.end > shift.onset), self._line[-1])
        holder.shifts.append(shift)

    def _release(self, behind: int) -> list[AssignedBatch]:
        """Let go of the batches that at least `behind` records follow."""
        decided = []
        while self._line and self._line[-1].end - self._line[0].end >= behind:
            held = self._line.popleft()
            if held.batch is not None:
                assert held.saved is not None
                self._released = held.saved, held.ghosts
                decided.append(AssignedBatch(held.batch, tuple(held.slots), tuple(held.shifts), self._released))
        return decided
