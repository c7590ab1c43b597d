"""The monitor: it assigns every record to a regime, once and in order, before the record is trained on.

The last `lookahead_records` records are held back, so that a shift is declared before its first record is trained on. A
batch is decided once that many records have come after it, or by a flush, and then waits in `lookahead` for the loop.

A restart restores the state after the last released batch was read and before the next one was. The next batches are
read again and lead to the same decisions. Some batches, released since, were still undecided at that time. Their slots
are part of the state (`MonitorState.undecided`): shifts and corrections that concern these batches are attached to
them again, and not to later batches. They are not released a second time.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import ShiftSettings
from streamlearn.shift import state_arrays
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.assignment import Assignment
from streamlearn.shift.featurizer import Featurizer, input_of
from streamlearn.shift.input_shift_detector import InputShiftDetector
from streamlearn.shift.lookahead import HeldBatch, Lookahead
from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.refused import RefusedRecord, RefusedReturn
from streamlearn.shift.regime_memory import RegimeMemory
from streamlearn.shift.request_classifier import RequestClassifier
from streamlearn.stream.batch import Batch

KeptAt = Callable[[int], Collection[int]]
"""Numbers of the regimes that keep their slots when the record with this ordinal is read."""


def _none_kept(_: int) -> Collection[int]:
    return ()


class Monitor:
    """Reads batches ahead of the learner and assigns their records to regimes."""

    def __init__(
        self, settings: ShiftSettings, vocab_size: int, seed: int, *, detector: InputShiftDetector | None = None
    ) -> None:
        assert vocab_size > 0
        self._settings = settings
        self._featurizer = Featurizer(seed)
        self._detector = detector or InputShiftDetector(settings)
        self.lookahead = Lookahead(settings.lookahead_records)
        self._released = MonitorState(self._detector.save())
        self._classifier: tuple[MonitorState, RequestClassifier] | None = None

    def update(self, batch: Batch, kept_at: KeptAt = _none_kept) -> list[AssignedBatch]:
        """Read the next batch; return the batches that are decided by it, in order: none, one or several.

        They wait in `lookahead` for the loop to take them.
        """
        held = HeldBatch(batch, self._detector.ordinal + 1)
        self.lookahead.append(held)
        for example in batch.examples:
            protected = self.lookahead.protected | self._slots_of(kept_at(self._detector.ordinal + 1))
            assigned = self._detector.update(self._featurizer.featurize(input_of(example)), protected)
            held.slots.append(assigned.slot)
            for ordinal, slot in assigned.reassigned:
                self.lookahead.correct(ordinal, slot)
            for shift in assigned.shifts:
                self.lookahead.attach(shift)
        return self._release(self.lookahead.decide(self._detector.save()))

    def flush(self) -> list[AssignedBatch]:
        """Decide all batches without waiting for more records, and return them."""
        return self._release(self.lookahead.flush(self._detector.save()))

    @property
    def records_read(self) -> int:
        """Ordinal of the newest record that was read, ahead of training."""
        return self._detector.ordinal

    @property
    def released(self) -> MonitorState:
        """The state after the last released batch was read and before the next one was."""
        return self._released

    def assign(
        self, inputs: Sequence[NDArray[np.int32]], as_of: MonitorState | None = None, *, slot: int | None = None
    ) -> list[Assignment]:
        """The likeliest regime of each input, classified by itself; slot 0 before the first record.

        Args:
            inputs: Their tokens.
            as_of: The state to use, `released` or an `AssignedBatch.after`; by default the current one.
            slot: Of the regime that every input is taken to belong to, instead of the likeliest.
        """
        state = MonitorState(self._detector.save()) if as_of is None else as_of
        if not any(state.detector.regimes):
            return [Assignment(0, 1.0)] * len(inputs)
        classifier = self._classifier_of(state)
        return [classifier.assign(self._featurizer.featurize(ids), slot) for ids in inputs]

    def rank(self, inputs: Sequence[NDArray[np.int32]], as_of: MonitorState) -> list[int]:
        """Slots of all regimes by how well they explain the inputs together, best first; `as_of`: see `assign`."""
        return self._regimes_of(as_of).rank([self._featurizer.featurize(ids) for ids in inputs])

    def state(self, as_of: MonitorState | None = None) -> dict[str, NDArray[np.generic]]:
        """Arrays for a snapshot, by default of `released`."""
        return state_arrays.to_arrays(self._released if as_of is None else as_of)

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Restore what `state` returned. The next batch to read is the one after the last released."""
        self._go_back(state_arrays.from_arrays(arrays))

    def refuse(
        self,
        returns: Iterable[RefusedReturn],
        records: Iterable[RefusedRecord],
        batch: Batch,
        as_of: MonitorState,
        kept_at: KeptAt = _none_kept,
    ) -> None:
        """Read the batches that wait again, as after a restart, without what was refused.

        Args:
            returns: All returns that were refused since `as_of`, none of which was entered; they are to new regimes.
            records: All records that were refused since `as_of`, none of which was trained on.
            batch: The batch that was taken last; it and those after it have not been trained on.
            as_of: The state after the batch before it.
            kept_at: That of `update`.
        """
        waiting, is_flushed = [batch, *self.lookahead.waiting], self.lookahead.is_flushed
        self._go_back(as_of, after_refusal=True)
        self._detector.refuse(returns, records)
        self._read_again(waiting, kept_at, is_flushed=is_flushed)

    def forget(self, slot: int, as_of: MonitorState, kept_at: KeptAt = _none_kept) -> MonitorState:
        """Forget the regime in `slot` as of the batch trained on last, and read the waiting batches again.

        They are decided as after a restart from the returned state. Nothing in the look-ahead refers to the regime any
        more. Batches that `as_of` lists as undecided count as decided: a shift that begins in one of them and is found
        later is attached to the first batch after them.

        Args:
            slot: The regime's slot.
            as_of: The state after that batch; every shift that was entered is in it.
            kept_at: That of `update`.

        Returns:
            The state that takes its place.
        """
        waiting, is_flushed = self.lookahead.waiting, self.lookahead.is_flushed
        self._detector.load(as_of.detector)
        self._detector.forget(slot)
        self._released = state = MonitorState(self._detector.save())
        self.lookahead.restart()
        self._read_again(waiting, kept_at, is_flushed=is_flushed)
        return state

    def _go_back(self, state: MonitorState, *, after_refusal: bool = False) -> None:
        self._released = state
        self._detector.load(state.detector)
        held, first = [], state.detector.ordinal + 1 - sum(map(len, state.undecided))
        for slots in state.undecided:
            held.append(HeldBatch(None, first, list(slots)))
            first += len(slots)
        self.lookahead.restart(held, after_refusal=after_refusal)

    def _read_again(self, batches: Sequence[Batch], kept_at: KeptAt, *, is_flushed: bool) -> None:
        for batch in batches:
            self.update(batch, kept_at)
        if is_flushed:
            self.flush()

    def _classifier_of(self, state: MonitorState) -> RequestClassifier:
        """The classifier under a state; the last one is kept, for requests between the same two batches."""
        if self._classifier is None or self._classifier[0] is not state:
            self._classifier = state, RequestClassifier.of(state)
        return self._classifier[1]

    def _slots_of(self, numbers: Collection[int]) -> set[int]:
        regimes = self._detector.regimes
        return {slot for slot in regimes.occupied if regimes[slot].number in numbers} if numbers else set()

    def _regimes_of(self, state: MonitorState) -> RegimeMemory:
        regimes = RegimeMemory(self._settings.max_regimes)
        regimes.load(state.detector.regimes, state.detector.next_number)
        return regimes

    def _release(self, decided: list[AssignedBatch]) -> list[AssignedBatch]:
        if decided:
            assert decided[-1].after is not None
            self._released = decided[-1].after
        return decided
