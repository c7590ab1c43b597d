"""The monitor: it assigns every record to a regime, once and in order, before the record is trained on.

The last `lookahead_records` records are held back, so that a shift is declared before its first record is trained on. A
batch is released once that many records have come after it.

A restart restores the state after the last released batch was read and before the next one was. The next batches are
read again and lead to the same decisions. Some batches, released since, were still held back at that time. Their slots
are part of the state (`MonitorState.held_slots`): shifts and corrections that concern these batches are attached to
them again, and not to later batches. They are not released a second time.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import ShiftSettings
from streamlearn.shift import state_arrays
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.featurizer import Featurizer, input_of
from streamlearn.shift.held_batch import HeldBatch
from streamlearn.shift.input_shift_detector import InputShiftDetector
from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.regime_memory import RegimeMemory
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch


class Monitor:
    """Reads batches ahead of the learner and assigns their records to regimes."""

    def __init__(
        self, settings: ShiftSettings, vocab_size: int, seed: int, *, detector: InputShiftDetector | None = None
    ) -> None:
        assert vocab_size > 0
        self._settings = settings
        self._featurizer = Featurizer(seed)
        self._detector = detector or InputShiftDetector(settings)
        self._held: deque[HeldBatch] = deque()
        self._released = MonitorState(self._detector.save())

    def update(self, batch: Batch) -> list[AssignedBatch]:
        """Read the next batch; return the batches that are now released, in order: none, one or several."""
        held = HeldBatch(batch, self._detector.ordinal + 1, [])
        self._held.append(held)
        for example in batch.examples:
            protected = {slot for each in self._held for slot in each.slots}
            assigned = self._detector.update(self._featurizer.featurize(input_of(example)), protected)
            held.slots.append(assigned.slot)
            for ordinal, slot in assigned.reassigned:
                self._correct(ordinal, slot)
            if assigned.shift is not None:
                self._attach(assigned.shift)
        held.after = MonitorState(self._detector.save(), tuple(tuple(each.slots) for each in self._held))
        return self._release(self._settings.lookahead_records)

    def flush(self) -> list[AssignedBatch]:
        """Release all batches, at the end of a finite stream."""
        return self._release(0)

    @property
    def released(self) -> MonitorState:
        """The state after the last released batch was read and before the next one was."""
        return self._released

    def assign(self, inputs: Sequence[NDArray[np.int32]], as_of: MonitorState | None = None) -> list[int]:
        """Slot of the likeliest regime of each input, classified by itself; 0 before the first record.

        `as_of` is the state to use, `released` or an `AssignedBatch.after`; by default the current one.
        """
        regimes = self._detector.regimes if as_of is None else self._regimes_of(as_of)
        if not len(regimes):
            return [0] * len(inputs)
        return regimes.assign(self._featurizer.featurize(ids) for ids in inputs)

    def state(self, as_of: MonitorState | None = None) -> dict[str, NDArray[np.generic]]:
        """Arrays for a snapshot, by default of `released`."""
        return state_arrays.to_arrays(self._released if as_of is None else as_of)

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Restore what `state` returned. The next batch to read is the one after the last released."""
        self._released = state_arrays.from_arrays(arrays)
        detector, held_slots = self._released.detector, self._released.held_slots
        self._detector.load(detector)
        self._held.clear()
        first = detector.ordinal + 1 - sum(map(len, held_slots))
        for slots in held_slots:
            self._held.append(HeldBatch(None, first, list(slots)))
            first += len(slots)

    def _regimes_of(self, state: MonitorState) -> RegimeMemory:
        regimes = RegimeMemory(self._settings.max_regimes)
        regimes.load(state.detector.regimes, state.detector.next_number)
        return regimes

    def _correct(self, ordinal: int, slot: int) -> None:
        """Change the slot of a record, if its batch is still held back."""
        for each in self._held:
            if each.first <= ordinal < each.end:
                each.slots[ordinal - each.first] = slot

    def _attach(self, shift: Shift) -> None:
        """Attach a shift to the batch with its onset, or else to the oldest held back."""
        holder = next((each for each in self._held if each.end > shift.onset), self._held[-1])
        holder.shifts.append(shift)

    def _release(self, num_after: int) -> list[AssignedBatch]:
        """Release the batches after which at least `num_after` records have come."""
        released = []
        while self._held and self._held[-1].end - self._held[0].end >= num_after:
            held = self._held.popleft()
            if held.batch is not None:
                assert held.after is not None
                self._released = held.after
                released.append(AssignedBatch(held.batch, tuple(held.slots), tuple(held.shifts), held.after))
        return released
