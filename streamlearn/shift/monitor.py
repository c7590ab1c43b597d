"""The room's door: every record once, in order, ahead of the learner.

The last `lookahead_records` records are held back, so that a shift is declared before its first record is trained on.
A batch leaves once so many records came after it. What a restart restores is the state as it was when the last batch
that left had just been looked at, so that the batches behind it, fed again, meet the same decisions. Batches that were
still held at that time are part of it, as *ghosts*: they take up the shifts and the corrections that they took up the
first time, and leave unseen.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import ShiftSettings
from streamlearn.shift import state_arrays as memory
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.featurizer import Featurizer, input_of
from streamlearn.shift.input_shift_detector import InputShiftDetector
from streamlearn.shift.lookahead import HeldBatch, Lookahead
from streamlearn.shift.regime_memory import RegimeMemory, RegimeSummary
from streamlearn.shift.state_arrays import Memory
from streamlearn.stream.batch import Batch


class Monitor:
    """Sees each record once, in order, ahead of the learner."""

    def __init__(
        self, settings: ShiftSettings, vocab_size: int, seed: int, *, watch: InputShiftDetector | None = None
    ) -> None:
        assert vocab_size > 0
        self._settings = settings
        self._featurizer = Featurizer(seed)
        self._watch = watch or InputShiftDetector(settings)
        self.lookahead = Lookahead(settings.lookahead_records)
        self._released: Memory = (self._watch.save(), ())

    def update(self, batch: Batch) -> list[AssignedBatch]:
        """Take the next batch; return those that it decides, in order: none, one or several.

        They wait in `lookahead` for the loop to take them.
        """
        held = HeldBatch(batch, self._watch.ordinal + 1)
        self.lookahead.append(held)
        for example in batch.examples:
            protected = self.lookahead.protected
            assignment = self._watch.update(self._featurizer.featurize(input_of(example)), protected)
            held.slots.append(assignment.slot)
            for ordinal, slot in assignment.moved:
                self.lookahead.correct(ordinal, slot)
            if assignment.shift is not None:
                self.lookahead.attach(assignment.shift)
        held.after = (self._watch.save(), self.lookahead.slots)
        return self._released_by(self.lookahead.decide())

    def flush(self) -> list[AssignedBatch]:
        """Decide what is held back, at the end of a finite stream, and return it."""
        return self._released_by(self.lookahead.finish())

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
        held, first = [], saved.ordinal + 1 - sum(map(len, ghosts))
        for slots in ghosts:
            held.append(HeldBatch(None, first, list(slots)))
            first += len(slots)
        self.lookahead.restart(held)

    def _as_of(self, then: Memory) -> RegimeMemory:
        saved, _ = then
        regimes = RegimeMemory(self._settings.max_regimes)
        regimes.thaw(saved.regimes, saved.next_number)
        return regimes

    def _released_by(self, decided: list[AssignedBatch]) -> list[AssignedBatch]:
        if decided:
            assert decided[-1].after is not None
            self._released = decided[-1].after
        return decided
