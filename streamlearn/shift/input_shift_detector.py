"""Detection of covariate shift, record by record: where one regime ends and the next begins.

1. A record that clearly belongs to another known regime is assigned to it; every other record belongs to the segment's
   regime (`RecordAssigner`), and so does one that was refused (`refuse`).
2. The segment's own records are compared with the segment before them, and records of other regimes are counted; both
   may raise an alarm (`Segment`).
3. The records of an alarm are the segment's after all, such as a burst of similar records, or those of another known
   regime that returns, or of a new one (`SegmentClassifier`).
4. The last two are a shift: the records move to that regime and begin a new segment. A return that was refused
   (`refuse`) is a new regime.
5. A regime that received a record may turn out to be two, mixed from the beginning (`mixture_test`). The smaller part
   becomes a regime of its own. This is a shift as well, but the segment goes on: both regimes are in the stream. Only
   where the smaller part is the newest run of the stream did the stream move on, as in 4.

The first record of the stream begins a regime, and so does the first after the segment's regime was forgotten.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from streamlearn.settings import ShiftSettings
from streamlearn.shift.alarm import Alarm
from streamlearn.shift.assigned_record import AssignedRecord
from streamlearn.shift.detector_state import DetectorState
from streamlearn.shift.featurizer import Features
from streamlearn.shift.mean_embedding_test import WINDOWS
from streamlearn.shift.mixture_test import LIKELY, UNLIKELY, YOUNG, separate
from streamlearn.shift.recent_record import RecentRecord
from streamlearn.shift.record_assigner import RecordAssigner
from streamlearn.shift.refused import RefusedRecord, RefusedReturn
from streamlearn.shift.regime_memory import RegimeMemory
from streamlearn.shift.segment import NO_SLOT, Segment
from streamlearn.shift.segment_classifier import MIN_RECORDS, Classification, SegmentClassifier
from streamlearn.shift.shift import Shift
from streamlearn.shift.window_tests import WindowTests


class InputShiftDetector:
    """Assigns records to regimes in stream order and declares shifts of the inputs.

    Without `per_record` every record is assigned to the segment's regime, and a mixture of regimes becomes a regime of
    its own. `windows` and `serial_correlation` are those of `MeanEmbeddingTest`.
    """

    def __init__(
        self,
        settings: ShiftSettings,
        *,
        windows: tuple[int, ...] = WINDOWS,
        serial_correlation: bool = True,
        per_record: bool = True,
    ) -> None:
        num_tests = 2 * len(windows) + 2  # of each record: two of every window, one of tokens, one of absence
        level = settings.false_alarms_per_million * 1e-6 / num_tests
        tests = WindowTests.of(level, windows, serial_correlation=serial_correlation)
        self._per_record = per_record and settings.enabled
        self._ordinal = self._num_shifts = 0
        self._refused: tuple[RefusedReturn, ...] = ()
        self._refused_records: tuple[RefusedRecord, ...] = ()
        self._regimes = RegimeMemory(settings.max_regimes)
        self._assigner = RecordAssigner(self._regimes)
        self._segment = Segment(settings, self._regimes, tests)
        self._classifier = SegmentClassifier(self._regimes, tests.mean_embedding)

    @property
    def ordinal(self) -> int:
        """Records received."""
        return self._ordinal

    @property
    def regimes(self) -> RegimeMemory:
        """The memory of regimes."""
        return self._regimes

    def save(self) -> DetectorState:
        """Return the state. Cheap: only profiles that changed since the last call are copied."""
        profiles, next_number = self._regimes.save(), self._regimes.next_number
        segment = self._segment.state
        return DetectorState(
            self._ordinal, self._num_shifts, segment, profiles, next_number, self._refused, self._refused_records
        )

    def load(self, state: DetectorState) -> None:
        """Continue from a saved state."""
        self._ordinal, self._num_shifts = state.ordinal, state.num_shifts
        self._segment.load(state.segment)
        self._regimes.load(state.regimes, state.next_number)
        self._refused = state.refused
        self._refused_records = state.refused_records

    def update(self, features: Features, protected: Collection[int]) -> AssignedRecord:
        """Assign the next record. Slots in `protected` are not freed for a new regime."""
        self._ordinal += 1
        self._refused = tuple(each for each in self._refused if each.declared_at >= self._ordinal)
        self._refused_records = tuple(each for each in self._refused_records if each.ordinal >= self._ordinal)
        here = self._segment.slot
        if here == NO_SLOT:
            return self._begin(features)
        scores = self._regimes.score(features)
        slot = self._assigner.assign(features, scores, here, self._segment.parent) if self._per_record else here
        slot = here if RefusedRecord(self._ordinal, slot) in self._refused_records else slot
        self._regimes.add(slot, features, self._ordinal)
        alarm = self._segment.add(RecentRecord(features, self._ordinal, slot, float(scores.log_ratios_R[slot])))
        shifted = self._handle(alarm, protected) if alarm else None
        if shifted or not self._per_record:
            return shifted or AssignedRecord(slot)
        return self._split(slot, protected)

    def forget(self, slot: int) -> None:
        """Forget the regime in a slot; if it is the segment's, the next record is the first of a new regime."""
        self._segment.forget(slot)
        self._regimes.forget(slot)

    def refuse(self, returns: Iterable[RefusedReturn], records: Iterable[RefusedRecord]) -> None:
        """Take what is still to be read for something else than it looks like.

        Args:
            returns: Shifts whose records are a new regime's.
            records: Records that are the segment's, unless a shift moves them.
        """
        self._refused = (*self._refused, *returns)
        self._refused_records = (*self._refused_records, *records)

    def _begin(self, features: Features) -> AssignedRecord:
        """Create a regime with the newest record: the first of the stream, or after the segment's was forgotten."""
        previous = self._segment.forgotten or None
        created = self._regimes.create(self._ordinal, ())
        assert created is not None, "the forgotten regime left its slot vacant"
        slot, _ = created
        self._regimes.add(slot, features, self._ordinal)
        self._segment.begin(RecentRecord(features, self._ordinal, slot, 0.0))
        self._num_shifts += 1
        at, regime = self._ordinal, self._regimes[slot].number
        shift = Shift("inputs", self._num_shifts, regime, slot, False, previous, at, at, 0.0, 0.0)
        return AssignedRecord(slot, (shift,))

    def _handle(self, alarm: Alarm, protected: Collection[int]) -> AssignedRecord | None:
        """Decide on an alarm; None if its records are the segment's, too few, or there is no slot for a new regime."""
        if len(alarm.records) < MIN_RECORDS:
            return None
        found = self._classifier.classify(alarm, self._segment.recent_records, self._segment.slot)
        if RefusedReturn(self._ordinal, found.slot) in self._refused:
            found = replace(found, known=False)
        if found.known and found.slot == self._segment.slot:
            self._segment.cool_down()
            return None
        if found.known:
            self._regimes.revisit(found.slot)
            return self._shift(alarm, found, NO_SLOT, None)
        held = {self._segment.slot, *self._segment.other_slots, *protected}
        created = self._regimes.create(found.records[0].ordinal, held)
        if created is None:
            return None
        slot, dropped = created
        parent = found.slot if found.slot != self._segment.slot or alarm.token_change else NO_SLOT
        return self._shift(alarm, replace(found, slot=slot), parent, dropped)

    def _shift(self, alarm: Alarm, found: Classification, parent: int, dropped: int | None) -> AssignedRecord:
        """Move on to the regime of the records, and assign the newest record."""
        newest = self._segment.recent_records[-1]
        shift = self._move_on(alarm, found, parent, dropped)
        reassigned = tuple((each.ordinal, shift.slot) for each in found.records)
        return AssignedRecord(shift.slot if newest in found.records else newest.slot, (shift,), reassigned)

    def _move_on(self, alarm: Alarm, found: Classification, parent: int, dropped: int | None) -> Shift:
        """Move the records to the regime in their slot and begin its segment with them."""
        shift = self._declare(replace(alarm, records=found.records), found.slot, known=found.known, dropped=dropped)
        for each in found.records:
            self._regimes.move(each.features, each.ordinal, each.slot, found.slot)
        self._segment.restart(found.slot, parent, found.records)
        return shift

    def _split(self, slot: int, protected: Collection[int]) -> AssignedRecord:
        """Test whether the regime of the newest record is a mixture, and its parts in turn."""
        shifts: list[Shift] = []
        reassigned: list[tuple[int, int]] = []
        untested = [slot]
        while untested:
            tested = untested.pop()
            if self._regimes[tested].records < self._regimes[tested].next_test:
                continue
            shift = self._split_once(tested, {*protected, *(pair[1] for pair in reassigned)})
            if shift is None:
                self._regimes.postpone_test(tested)
                continue
            shifts.append(shift)
            untested += [shift.slot, tested]
            reassigned += [
                (each.ordinal, each.slot) for each in self._segment.recent_records if each.slot == shift.slot
            ]
        return AssignedRecord(self._segment.recent_records[-1].slot, tuple(shifts), tuple(reassigned))

    def _split_once(self, slot: int, protected: Collection[int]) -> Shift | None:
        """Split a regime in two; None if it is one, or if there is no slot for a new one."""
        recent = {each.ordinal: each for each in self._segment.recent_records if each.slot == slot}
        found = self._separate(slot, recent)
        if found is None:
            return None
        alarm, smaller, larger = found
        held = {slot, self._segment.slot, *self._segment.other_slots, *protected}
        created = self._regimes.create(min(smaller & recent.keys(), default=self._ordinal), held)
        if created is None:
            return None
        new, dropped = created
        if slot == self._segment.slot and smaller <= recent.keys() and min(smaller) > max(larger):
            self._regimes.mark_separated((slot, new))  # one run, up to the newest record: no mixture
            return self._move_on(alarm, Classification(new, False, alarm.records), NO_SLOT, dropped)
        self._regimes.divide(slot, new, smaller, self._ordinal)
        for each in recent.values():
            self._regimes.add(new if each in alarm.records else slot, each.features, each.ordinal)
        self._segment.split(alarm.records, new)
        self._regimes.calibrate()
        return self._declare(alarm, new, known=False, parent=self._regimes[slot].number, dropped=dropped)

    def _separate(self, slot: int, recent: Mapping[int, RecentRecord]) -> tuple[Alarm, set[int], set[int]] | None:
        """Divide the sample and the recent records of a regime; None if it is one regime.

        Returns:
            The recent records of the smaller part, with the statistic, and the ordinals of both parts.
        """
        profile = self._regimes[slot]
        buckets = {each.ordinal: each.buckets for each in profile.sample}
        buckets |= {ordinal: each.features.buckets for ordinal, each in recent.items()}
        ordinals = sorted(buckets)
        is_young = profile.records <= YOUNG
        threshold = LIKELY if profile.is_separated or profile.number == 1 else UNLIKELY
        separation = separate([buckets[ordinal] for ordinal in ordinals], threshold=threshold, is_young=is_young)
        if separation is None:
            return None
        smaller = {ordinal for ordinal, is_smaller in zip(ordinals, separation.is_smaller, strict=True) if is_smaller}
        moved = tuple(each for ordinal, each in recent.items() if ordinal in smaller)
        return Alarm(separation.statistic, threshold, moved), smaller, set(ordinals) - smaller

    def _declare(
        self, alarm: Alarm, slot: int, *, known: bool, dropped: int | None, parent: int | None = None
    ) -> Shift:
        """The shift to the regime in `slot`; the segment may move on after it."""
        self._num_shifts += 1
        return Shift(
            kind="inputs",
            number=self._num_shifts,
            regime=self._regimes[slot].number,
            slot=slot,
            known=known,
            previous=self._regimes[self._segment.slot].number,
            declared_at=self._ordinal,
            onset=alarm.records[0].ordinal if alarm.records else self._ordinal,
            statistic=alarm.statistic,
            threshold=alarm.threshold,
            parent=parent,
            dropped=dropped,
        )
