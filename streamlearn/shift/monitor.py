"""The monitor: it assigns every record to a regime, once and in order, before the record is trained on.

The last `lookahead_records` records are held back, so that a shift is declared before its first record is trained on. A
batch is decided once that many records have come after it, or by a flush, and then waits in `lookahead` for the loop.

A restart restores the state after the last released batch was read and before the next one was. The next batches are
read again and lead to the same decisions. Some batches, released since, were still undecided at that time. Their slots
are part of the state (`MonitorState.undecided`): shifts and corrections that concern these batches are attached to
them again, and not to later batches. They are not released a second time.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import ShiftSettings
from streamlearn.shift import change_tests as ragged
from streamlearn.shift.change_tests import AbsenceState, RecentRecord, ReferenceDistribution, RunningStats, stack_phi
from streamlearn.shift.features import NUM_BUCKETS, DocumentFrequency, Features, Featurizer, count_records, input_of
from streamlearn.shift.input_shift import (
    Assignment,
    DetectorState,
    InputShiftDetector,
    MonitorState,
    RefusedRecord,
    RefusedReturn,
    SegmentState,
    Shift,
    WindowState,
)
from streamlearn.shift.memory import ADDED_SCALARS, SCALARS, RegimeMemory, RegimeProfile, SampledRecord, SavedProfiles
from streamlearn.shift.routing import RequestClassifier
from streamlearn.stream.record import Batch, Example


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


# The look-ahead buffer: batches between the reader and the learner, in order.
#
# A batch is in one of two states:
#
#     undecided   fewer than `lookahead_records` records follow. The slots of its records may still be corrected, and a
#                 shift may still be attached to it.
#     decided     its slots and shifts are final. It is the next to be trained on, or waits until the new regime that
#                 begins in it has the tokens needed for its probe.
#
# A flush decides every batch, and none waits for its probe. A shift that is found later, although it begins in a
# flushed batch, is attached to the first batch after it.
#
# A snapshot covers the batches up to the last one trained on. Later batches are read and decided again after a restart,
# in the same way, so the buffer is not saved. Only the slots of the batches that stayed undecided when the last one had
# been read are: they influenced later decisions, so they are put back, decided again and dropped.
# A shift that is found again and begins in one of them was entered, and is dropped too.
#
# When something in a batch is refused, that batch and those after it are read again from the state before it. What was
# entered before is found again as it was and dropped, since nothing that it was found from is refused
# (`entered_until`).
# Another shift may then be found sooner than before, and begin in a batch that was trained on without it. It is
# attached to the first batch that is read again.


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
        return to_arrays(self._released if as_of is None else as_of)

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Restore what `state` returned. The next batch to read is the one after the last released."""
        self._go_back(from_arrays(arrays))

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


Arrays = Mapping[str, NDArray[np.generic]]
_INTEGER_SCALARS = ("number", "visits", "records", "first_record", "last_record", "is_separated", "next_test")
_VACANT = RegimeProfile(number=0, first_record=0)  # numbers of regimes begin at 1


def to_arrays(state: MonitorState) -> dict[str, NDArray[np.generic]]:
    """The state by array name. No array holds objects."""
    detector, undecided, segment = state.detector, state.undecided, state.detector.segment
    absence, window = segment.absence, segment.window
    integers = (
        detector.ordinal,
        segment.slot,
        detector.num_shifts,
        segment.num_records,
        absence.run_start,
        segment.parent,
        segment.cooldown,
        detector.next_number,
    )
    return {
        "integers": np.array(integers, dtype=np.int64),
        "usual": np.array(astuple(window.fits_before), dtype=np.float64),
        "reals": np.array([absence.share, absence.statistic], dtype=np.float64),
        "shares.records": window.tokens_before.records_B,
        "shares.number": np.array([window.tokens_before.num_records]),
        **_records_to_arrays("window", window.records),
        **_records_to_arrays("others", segment.other_records),
        **profiles_to_arrays(detector.regimes),
        "ghosts.sizes": np.array([len(slots) for slots in undecided], dtype=np.int64),
        "ghosts.slots": np.array([slot for slots in undecided for slot in slots], dtype=np.int64),
        **({"forgotten": np.array([segment.forgotten], dtype=np.int64)} if segment.forgotten else {}),
        **_refusals("refused", detector.refused),
        **_refusals("refused.records", detector.refused_records),
    }


def from_arrays(arrays: Arrays) -> MonitorState:
    """Inverse of `to_arrays`."""
    ordinal, slot, num_shifts, num_records, run_start, parent, cooldown, next_number = arrays["integers"].tolist()
    share, statistic = arrays["reals"].tolist()
    tokens_before = DocumentFrequency(
        np.array(arrays["shares.records"], dtype=np.float32), float(arrays["shares.number"][0])
    )
    fits_before = RunningStats(*arrays["usual"].tolist())
    segment = SegmentState(
        slot=slot,
        parent=parent,
        num_records=num_records,
        cooldown=cooldown,
        window=WindowState(_records_from_arrays("window", arrays), fits_before, tokens_before),
        other_records=_records_from_arrays("others", arrays),
        absence=AbsenceState(share, statistic, run_start),
        forgotten=int(arrays["forgotten"][0]) if "forgotten" in arrays else 0,
    )
    detector = DetectorState(
        ordinal,
        num_shifts,
        segment,
        profiles_from_arrays(arrays),
        next_number,
        tuple(RefusedReturn(*row) for row in arrays["refused"].tolist()) if "refused" in arrays else (),
        tuple(RefusedRecord(*row) for row in arrays["refused.records"].tolist()) if "refused.records" in arrays else (),
    )
    slots = iter(arrays["ghosts.slots"].tolist())
    return MonitorState(detector, tuple(tuple(islice(slots, size)) for size in arrays["ghosts.sizes"].tolist()))


def _refusals(name: str, refused: Sequence[RefusedReturn | RefusedRecord]) -> dict[str, NDArray[np.generic]]:
    """One row each; nothing if there are none."""
    return {name: np.array(list(map(astuple, refused)), dtype=np.int64)} if refused else {}


def profiles_to_arrays(saved: SavedProfiles) -> dict[str, NDArray[np.generic]]:
    """Regime profiles, one row per slot; that of a vacant one has the number 0."""
    profiles = [_VACANT if each is None else each for each in saved]
    references = [each.reference.to_row() for each in profiles]
    frequencies = [each.token_frequency for each in profiles]
    sampled = [record for each in profiles for record in each.sample]
    return {
        "regimes.counts": _rows([each.counts_B for each in profiles], np.float32, NUM_BUCKETS),
        "regimes.scalars": _scalars(SCALARS, profiles),
        "regimes.references": _rows(references, np.float64, ReferenceDistribution.ROW),
        "regimes.shares": _rows([each.records_B for each in frequencies], np.float32, NUM_BUCKETS),
        "regimes.shares.numbers": np.array([each.num_records for each in frequencies], dtype=np.float64),
        "regimes.exemplars": np.array([len(each.sample) for each in profiles], dtype=np.int64),
        "regimes.sampled": _rows([np.array([each.log_length, each.ordinal]) for each in sampled], np.float64, 2),
        "regimes.scalars.added": _scalars(ADDED_SCALARS, profiles),
        **ragged.to_arrays("regimes.exemplars", [record.buckets for record in sampled]),
    }


def profiles_from_arrays(arrays: Arrays) -> SavedProfiles:
    """Inverse of `profiles_to_arrays`."""
    buckets = ragged.from_arrays("regimes.exemplars", arrays)
    if "regimes.sampled" in arrays:
        details = arrays["regimes.sampled"].tolist()
    else:  # written before they were kept: the length is that of the buckets, and the order is unknown
        details = [(float(np.log(len(each))), -index) for index, each in enumerate(buckets)]
    pairs = zip(buckets, details, strict=True)
    sampled = iter([SampledRecord(each, log_length, int(ordinal)) for each, (log_length, ordinal) in pairs])
    return tuple(
        _profile_from_arrays(arrays, slot, tuple(islice(sampled, number)))
        for slot, number in enumerate(arrays["regimes.exemplars"].tolist())
    )


def _profile_from_arrays(arrays: Arrays, slot: int, sample: tuple[SampledRecord, ...]) -> RegimeProfile | None:
    if int(arrays["regimes.scalars"][slot][SCALARS.index("number")]) == _VACANT.number:
        return None
    scalars = dict(zip(SCALARS, arrays["regimes.scalars"][slot].tolist(), strict=True))
    if "regimes.scalars.added" in arrays:
        scalars |= zip(ADDED_SCALARS, arrays["regimes.scalars.added"][slot].tolist(), strict=True)
    else:  # older snapshots judge single records by the one scale that they have
        scalars["fit_tail"] = scalars["fit_scale"]
    values: dict[str, Any] = scalars | {name: int(scalars[name]) for name in _INTEGER_SCALARS if name in scalars}
    if "regimes.shares" in arrays:
        records_B = np.array(arrays["regimes.shares"][slot], dtype=np.float32)
        token_frequency = DocumentFrequency(records_B, float(arrays["regimes.shares.numbers"][slot]))
    else:  # written before document frequencies were kept: estimated from the sample
        token_frequency = DocumentFrequency(count_records(each.buckets for each in sample), float(len(sample)))
    return RegimeProfile(
        counts_B=np.array(arrays["regimes.counts"][slot], dtype=np.float32),
        reference=ReferenceDistribution.from_row(np.asarray(arrays["regimes.references"][slot], dtype=np.float64)),
        token_frequency=token_frequency,
        sample=sample,
        **values,
    )


def _records_to_arrays(name: str, records: Sequence[RecentRecord]) -> dict[str, NDArray[np.generic]]:
    return {
        f"{name}.phi": stack_phi(records),
        f"{name}.log_length": np.array([each.features.log_length for each in records], np.float64),
        f"{name}.ordinal": np.array([each.ordinal for each in records], np.int64),
        f"{name}.slot": np.array([each.slot for each in records], np.int64),
        f"{name}.log_ratio": np.array([each.log_ratio for each in records], np.float64),
        **ragged.to_arrays(f"{name}.buckets", [each.features.buckets for each in records]),
    }


def _records_from_arrays(name: str, arrays: Arrays) -> tuple[RecentRecord, ...]:
    phi_ND = np.array(arrays[f"{name}.phi"], dtype=np.float32)
    buckets = ragged.from_arrays(f"{name}.buckets", arrays)
    summaries = zip(phi_ND, buckets, arrays[f"{name}.log_length"].tolist(), strict=True)
    features = [Features(*each) for each in summaries]
    columns = (arrays[f"{name}.{column}"].tolist() for column in ("ordinal", "slot", "log_ratio"))
    return tuple(RecentRecord(*each) for each in zip(features, *columns, strict=True))


def _scalars(names: Sequence[str], profiles: Sequence[RegimeProfile]) -> NDArray[Any]:
    values = [np.array([getattr(each, name) for name in names], dtype=np.float64) for each in profiles]
    return _rows(values, np.float64, len(names))


def _rows(rows: Sequence[NDArray[Any]], dtype: type, width: int) -> NDArray[Any]:
    return np.array(rows, dtype=dtype).reshape(len(rows), width)
