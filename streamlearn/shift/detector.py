"""Detection of covariate shift, record by record: where one regime ends and the next begins.

1. A record that clearly belongs to another known regime is assigned to it; every other record belongs to the segment's
   regime (`classify.assign_record`).
2. The segment's own records are compared with the segment before them, and records of other regimes are counted; both
   may raise an alarm (`change_tests`).
3. The records of an alarm belong to the segment after all, such as a burst of similar records, or to another known
   regime that returns, or to a new one (`classify.classify`).
4. The last two are a shift: the records move to that regime and begin a new segment.
5. A regime that received a record may turn out to be two, mixed from the beginning (`mixture`). The smaller part
   becomes a separate regime. This is a shift as well, but the segment continues: both regimes are in the stream. If the
   smaller part is the newest run of the stream, the stream has moved on, as in 4.

The first record of the stream begins a regime, and so does the first after the segment's regime was forgotten. Losses
may contradict an assignment later (`Refusal`); the records then move to another regime.
"""
# Shape suffixes: R regimes.

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from streamlearn.shift.change_tests import (
    OTHER_TESTS,
    SIZE,
    WINDOW_TESTS,
    Absence,
    Alarm,
    RecentRecord,
    Window,
    WindowTest,
)
from streamlearn.shift.classify import MIN_RECORDS, Classification, assign_record, classify
from streamlearn.shift.features import Features
from streamlearn.shift.memory import MATURE, Profiles, RegimeMemory, RegimeScores
from streamlearn.shift.mixture import LIKELY, UNLIKELY, YOUNG, separate
from streamlearn.shift.reference import IDENTITY, Metric

if TYPE_CHECKING:
    from streamlearn.settings import ShiftSettings

NO_SLOT = -1
WHITENED_EVERY = 64
"""Records of the stream after which the metric is taken anew."""
COOLDOWN = 4
"""Records of the segment's regime after a false alarm before its window is tested again."""


@dataclass(frozen=True, eq=False)
class Segment:
    """The part of the stream since the last shift. A value: updates return a new one and commit records to profiles.

    Records of the segment's regime enter its window. A record that leaves the window is committed to the profile of its
    regime, and to the statistics with which the tests compare the window.
    """

    slot: int = NO_SLOT
    """Slot of its regime; `NO_SLOT` before the first record, and after its regime was forgotten."""
    parent: int = NO_SLOT
    """Slot of the regime from which its regime was split, if the segment is the regime's first; else `NO_SLOT`."""
    num_records: int = 0
    """Records of its regime since it began."""
    cooldown: int = 0
    window: Window = field(default_factory=Window)
    others: tuple[RecentRecord, ...] = ()
    """At most `SIZE` records of other regimes."""
    absence: Absence = field(default_factory=Absence)
    forgotten: int = 0
    """Number of its regime if that was forgotten and no record has come since; else 0."""

    @property
    def recent_records(self) -> tuple[RecentRecord, ...]:
        """The records that may still move to another regime, in stream order."""
        return tuple(sorted((*self.window.records, *self.others), key=lambda record: record.ordinal))

    @property
    def slots(self) -> set[int]:
        """Slots of its regime, and of the other regimes that recent records belong to."""
        return {self.slot, *(record.slot for record in self.others)}

    def after(self, record: RecentRecord, regimes: RegimeMemory) -> "Segment":
        """Add the next record of the stream."""
        absence = self.absence.after(record.ordinal, own=record.slot == self.slot)
        if record.slot != self.slot:
            return replace(self, others=_with_other(self.others, record, regimes), absence=absence)
        window = replace(self.window, records=(*self.window.records, record))
        if len(window.records) > SIZE:  # a segment may begin with more; the window does not grow then
            window = _without_oldest(window, regimes)
        cooldown = max(self.cooldown - 1, 0)
        return replace(self, num_records=self.num_records + 1, cooldown=cooldown, window=window, absence=absence)

    def begin(self, record: RecentRecord, regimes: RegimeMemory) -> "Segment":
        """Begin with a record that comes after none, or after the segment's regime was forgotten."""
        return replace(self, slot=record.slot, forgotten=0).after(record, regimes)

    def restart(self, slot: int, parent: int, records: Collection[RecentRecord], regimes: RegimeMemory) -> "Segment":
        """Begin a new segment with some of the recent records, which are its window."""
        newest = self.recent_records[-1].ordinal
        staying = [record for record in self.window.records if record not in records]
        for record in staying:
            regimes.commit(record)
        regimes.calibrate()
        return Segment(
            slot=slot,
            parent=parent,
            num_records=len(records),
            window=Window(tuple(replace(record, slot=slot) for record in records)),
            others=tuple(record for record in self.others if record not in records),
            absence=self.absence.restarted(records, newest),
        )

    def split(self, moved: Collection[RecentRecord], new: int, regimes: RegimeMemory) -> "Segment":
        """Move recent records to the regime in `new`, which occurs among the segment's own. The segment continues.

        Its statistics held the records of both regimes, so they restart.
        """
        newest, segment = self.recent_records[-1].ordinal, self
        staying = tuple(record for record in self.window.records if record not in moved)
        kept = [record for record in self.others if record not in moved]
        if len(staying) < len(self.window.records):
            absence = self.absence.restarted(staying, newest)
            segment = Segment(self.slot, num_records=len(staying), window=Window(staying), absence=absence)
        others: tuple[RecentRecord, ...] = ()
        added = (*kept, *(replace(record, slot=new) for record in moved))
        for record in sorted(added, key=lambda record: record.ordinal):
            others = _with_other(others, record, regimes)
        return replace(segment, others=others)

    def reassign(self, moved: Mapping[int, RecentRecord], old: int, new: int, regimes: RegimeMemory) -> "Segment":
        """Give recent records, by ordinal, to the regime in `new`; the segment, too, if it belongs to `old`."""
        slot = new if self.slot == old else self.slot
        window = [moved.get(record.ordinal, record) for record in self.window.records]
        others = [moved.get(record.ordinal, record) for record in self.others]
        if new == self.slot:
            window += [record for record in others if record.ordinal in moved]
            others = [record for record in others if record.ordinal not in moved]
        records = tuple(sorted(window, key=lambda record: record.ordinal))
        renewed = replace(self.window, records=records)
        for _ in range(len(records) - max(len(self.window.records), SIZE)):
            renewed = _without_oldest(renewed, regimes)
        return replace(
            self,
            slot=slot,
            parent=old if slot != self.slot else self.parent,
            num_records=self.num_records + len(records) - len(self.window.records),
            window=renewed,
            others=tuple(others),
        )

    def forget(self, slot: int, regimes: RegimeMemory) -> "Segment":
        """Forget the records of the regime in a slot. If it is the segment's, the next record begins a segment."""
        others = tuple(record for record in self.others if record.slot != slot)
        if self.slot == slot:
            return Segment(others=others, forgotten=regimes[slot].number)
        return replace(self, others=others, parent=NO_SLOT if self.parent == slot else self.parent)


def _without_oldest(window: Window, regimes: RegimeMemory) -> Window:
    """Commit the oldest record of the window."""
    oldest, *records = window.records
    regimes.commit(oldest)
    is_old = regimes[oldest.slot].records >= 2 * MATURE  # the fit of a young regime's records still rises
    fits_before = window.fits_before.after(oldest.fit) if is_old else window.fits_before
    return Window(tuple(records), fits_before, window.tokens_before.after(oldest.features.buckets))


def _with_other(
    others: tuple[RecentRecord, ...], record: RecentRecord, regimes: RegimeMemory
) -> tuple[RecentRecord, ...]:
    """Add a record; commit the oldest if there are too many."""
    others = (*others, record)
    if len(others) <= SIZE:
        return others
    oldest, *rest = others
    regimes.commit(oldest)
    return tuple(rest)


@dataclass(frozen=True)
class Shift:
    """A declared change. Ordinals count the records that the monitor has read, from 1."""

    kind: Literal["inputs", "answers"]
    """Covariate shift, or concept drift."""
    number: int
    """Counts the shifts of this kind, from 1."""
    regime: int
    """Number of the regime entered, or of the one whose answers changed. Numbers are never reused."""
    slot: int
    """Where the regime's state is kept, below `max_regimes`. Slots are reused."""
    known: bool
    """Whether the regime occurred before."""
    previous: int | None
    """Number of the previous regime, which may have been dropped since; None for the first regime of the stream."""
    declared_at: int
    """Ordinal of the record at which the shift was declared."""
    onset: int
    """Estimated ordinal of its first record."""
    statistic: float
    threshold: float
    parent: int | None = None
    """Number of the regime that it was split from, which remains in the stream; None if the stream moved to it."""
    dropped: int | None = None
    """Number of the regime that was dropped, or merged into another, to free the slot."""


@dataclass(frozen=True)
class Refusal:
    """An assignment that losses contradicted: the inputs looked like a known regime, the losses did not."""

    at: int
    """Ordinal of the newest record when it was decided. A replay repeats it there."""
    slot: int
    """Slot of the regime that loses its records from `first` on."""
    first: int
    last_record: int
    """Ordinal of the regime's last record before them."""
    target: int | None
    """Slot of the regime that gets them; None for a new one."""
    protected: tuple[int, ...]
    """Slots that must not be freed for the new regime."""


@dataclass(frozen=True)
class AssignedRecord:
    """A record's regime, and the shifts that were declared at it."""

    slot: int
    shifts: tuple[Shift, ...] = ()
    reassigned: tuple[tuple[int, int], ...] = ()
    """Ordinal and new slot of each record that a shift moves to its regime; the last one counts."""


@dataclass(frozen=True, eq=False)
class DetectorState:
    """Everything that later decisions depend on: values that are never written to."""

    ordinal: int = 0
    """Records received."""
    num_shifts: int = 0
    segment: Segment = field(default_factory=Segment)
    regimes: Profiles = ()
    next_number: int = 1
    """Number of the next new regime."""
    metric: Metric = field(default_factory=IDENTITY.copy)
    refusals: tuple[Refusal, ...] = ()
    """Refusals that were decided after records which a replay has yet to read."""

    @property
    def numbers(self) -> dict[int, int]:
        """Number of each regime, by slot."""
        return {slot: profile.number for slot, profile in enumerate(self.regimes) if profile is not None}


class InputShiftDetector:
    """Assigns records to regimes in stream order and declares shifts of the inputs."""

    def __init__(self, settings: "ShiftSettings", *, tests: Sequence[WindowTest] = WINDOW_TESTS) -> None:
        self._settings = settings
        self._tests = tests
        self._level = settings.false_alarms_per_million * 1e-6 / (len(tests) + len(OTHER_TESTS))
        self.load(DetectorState())

    def load(self, state: DetectorState) -> None:
        """Continue from a state."""
        self.ordinal, self._num_shifts, self.segment = state.ordinal, state.num_shifts, state.segment
        self.regimes = RegimeMemory(self._settings.max_regimes, state.regimes, state.next_number, state.metric)
        self._refusals = state.refusals

    @property
    def state(self) -> DetectorState:
        """The present state; nothing is copied."""
        memory = self.regimes
        return DetectorState(
            self.ordinal,
            self._num_shifts,
            self.segment,
            memory.profiles,
            memory.next_number,
            memory.metric,
            self._refusals,
        )

    def update(self, features: Features, protected: Collection[int]) -> AssignedRecord:
        """Assign the next record. Slots in `protected` are not freed for a new regime."""
        self.ordinal += 1
        if self.ordinal % WHITENED_EVERY == 0:
            self.regimes.whiten()
        if self.segment.slot == NO_SLOT:
            return self._begin(features)
        scores = self.regimes.score(features)
        slot = self._assign(features, scores)
        self.regimes.add(slot, features, self.ordinal)
        record = RecentRecord(features, self.ordinal, slot, float(scores.log_ratios_R[slot]))
        self.segment = self.segment.after(record, self.regimes)
        alarm = self._alarm(record)
        shifted = self._handle(alarm, protected) if alarm else None
        return shifted or self._split(slot, protected)

    def forget(self, slot: int) -> None:
        """Forget the regime in a slot; if it is the segment's, the next record is the first of a new regime."""
        self.segment = self.segment.forget(slot, self.regimes)
        self._refusals = tuple(refusal for refusal in self._refusals if slot not in (refusal.slot, refusal.target))
        self.regimes.forget(slot)

    def refusals_due(self) -> list[Refusal]:
        """Remove and return the refusals that were decided after the records read so far."""
        due = [refusal for refusal in self._refusals if refusal.at <= self.ordinal]
        self._refusals = tuple(refusal for refusal in self._refusals if refusal not in due)
        return due

    def refuse(self, refusal: Refusal) -> tuple[int, int | None] | None:
        """Move a regime's recent records to another.

        Returns:
            The slot that they move to, and the number of the regime that was dropped to free it, as from
            `RegimeMemory.create`. None, and nothing changes, if no slot is free or none of them is recent any more.
        """
        old, regimes = refusal.slot, self.regimes
        recent = self.segment.recent_records
        moved = [record for record in recent if record.slot == old and record.ordinal >= refusal.first]
        if not moved:
            return None
        created = regimes.create(moved[0].ordinal, refusal.protected) if refusal.target is None else None
        if refusal.target is None and created is None:
            return None
        new, dropped = created if created is not None else (refusal.target or 0, None)
        renewed: dict[int, RecentRecord] = {}
        for record in moved:
            log_ratio = float(regimes.score(record.features).log_ratios_R[new])
            regimes.move(record, new)
            renewed[record.ordinal] = replace(record, slot=new, log_ratio=log_ratio)
        visits = regimes[old].visits - (refusal.target is None)
        regimes.change(old, last_record=refusal.last_record, visits=visits)
        self.segment = self.segment.reassign(renewed, old, new, regimes)
        regimes.calibrate()
        return new, dropped

    def _assign(self, features: Features, scores: RegimeScores) -> int:
        if not self._settings.enabled:
            return self.segment.slot
        return assign_record(features, scores, self.segment.slot, self.segment.parent, self.regimes)

    def _alarm(self, record: RecentRecord) -> Alarm | None:
        """Test for the end of the segment: the first test that exceeds its threshold raises the alarm."""
        segment = self.segment
        if record.slot != segment.slot:
            other = self.regimes.reference(record.slot)
            others = (test(segment.absence, segment.others, other, self._level) for test in OTHER_TESTS)
            return next((alarm for alarm in others if alarm), None)
        if not self._settings.enabled or segment.cooldown or segment.num_records < self._settings.min_dwell_records:
            return None
        reference = self.regimes.reference(segment.slot)
        alarms = (test(segment.window, reference, self._level) for test in self._tests)
        return next((alarm for alarm in alarms if alarm), None)

    def _begin(self, features: Features) -> AssignedRecord:
        """Create a regime with the newest record: the first of the stream, or after the segment's was forgotten."""
        previous, at = self.segment.forgotten or None, self.ordinal
        created = self.regimes.create(at, ())
        assert created is not None, "the forgotten regime left its slot vacant"
        slot, _ = created
        self.regimes.add(slot, features, at)
        self.segment = self.segment.begin(RecentRecord(features, at, slot, 0.0), self.regimes)
        self._num_shifts += 1
        shift = Shift("inputs", self._num_shifts, self.regimes[slot].number, slot, False, previous, at, at, 0.0, 0.0)
        return AssignedRecord(slot, (shift,))

    def _handle(self, alarm: Alarm, protected: Collection[int]) -> AssignedRecord | None:
        """Decide on an alarm; None if its records are the segment's, too few, or there is no slot for a new regime."""
        if len(alarm.records) < MIN_RECORDS:
            return None
        here = self.segment.slot
        result = classify(alarm, self.segment.recent_records, here, self.regimes)
        if result.known and result.slot == here:
            self.segment = replace(self.segment, cooldown=COOLDOWN)
            return None
        parent, dropped = NO_SLOT, None
        if result.known:
            self.regimes.change(result.slot, visits=self.regimes[result.slot].visits + 1)
        else:
            created = self.regimes.create(result.records[0].ordinal, {*self.segment.slots, *protected})
            if created is None:
                return None
            parent = result.slot if result.slot != here or alarm.token_change else NO_SLOT
            slot, dropped = created
            result = replace(result, slot=slot)
        newest = self.segment.recent_records[-1]
        shift = self._move_on(alarm, result, parent, dropped)
        reassigned = tuple((record.ordinal, shift.slot) for record in result.records)
        return AssignedRecord(shift.slot if newest in result.records else newest.slot, (shift,), reassigned)

    def _move_on(self, alarm: Alarm, result: Classification, parent: int, dropped: int | None) -> Shift:
        """Move the records to the regime in their slot and begin its segment with them."""
        shift = self._declare(replace(alarm, records=result.records), result.slot, known=result.known, dropped=dropped)
        for record in result.records:
            self.regimes.move(record, result.slot)
        self.segment = self.segment.restart(result.slot, parent, result.records, self.regimes)
        return shift

    def _split(self, slot: int, protected: Collection[int]) -> AssignedRecord:
        """Test whether the regime of the newest record is a mixture, and its parts in turn."""
        shifts: list[Shift] = []
        reassigned: list[tuple[int, int]] = []
        untested = [slot] if self._settings.enabled else []
        while untested:
            tested = untested.pop()
            if self.regimes[tested].records < self.regimes[tested].next_test:
                continue
            shift = self._split_once(tested, {*protected, *(new for _, new in reassigned)})
            if shift is None:
                self.regimes.postpone_test(tested)
                continue
            shifts.append(shift)
            untested += [shift.slot, tested]
            recent = self.segment.recent_records
            reassigned += [(record.ordinal, record.slot) for record in recent if record.slot == shift.slot]
        return AssignedRecord(self.segment.recent_records[-1].slot, tuple(shifts), tuple(reassigned))

    def _split_once(self, slot: int, protected: Collection[int]) -> Shift | None:
        """Split a regime in two; None if it is one, or if there is no slot for a new one."""
        recent = {record.ordinal: record for record in self.segment.recent_records if record.slot == slot}
        parts = self._separate(slot, recent)
        if parts is None:
            return None
        alarm, smaller, larger = parts
        first = min(smaller & recent.keys(), default=self.ordinal)
        created = self.regimes.create(first, {slot, *self.segment.slots, *protected})
        if created is None:
            return None
        new, dropped = created
        if slot == self.segment.slot and smaller <= recent.keys() and min(smaller) > max(larger):
            for part in (slot, new):
                self.regimes.change(part, was_split=True)  # one run, up to the newest record: no mixture
            return self._move_on(alarm, Classification(new, False, alarm.records), NO_SLOT, dropped)
        self.regimes.divide(slot, new, smaller, self.ordinal)
        for record in recent.values():
            self.regimes.add(new if record in alarm.records else slot, record.features, record.ordinal)
        self.segment = self.segment.split(alarm.records, new, self.regimes)
        self.regimes.calibrate()
        return self._declare(alarm, new, known=False, parent=self.regimes[slot].number, dropped=dropped)

    def _separate(self, slot: int, recent: Mapping[int, RecentRecord]) -> tuple[Alarm, set[int], set[int]] | None:
        """Divide the sample and the recent records of a regime; None if it is one regime.

        Returns:
            The recent records of the smaller part, with the statistic, and the ordinals of both parts.
        """
        profile = self.regimes[slot]
        buckets = {record.ordinal: record.buckets for record in profile.sample}
        buckets |= {ordinal: record.features.buckets for ordinal, record in recent.items()}
        ordinals = sorted(buckets)
        threshold = LIKELY if profile.was_split or profile.number == 1 else UNLIKELY
        is_young = profile.records <= YOUNG
        separation = separate([buckets[ordinal] for ordinal in ordinals], threshold=threshold, is_young=is_young)
        if separation is None:
            return None
        smaller = {ordinal for ordinal, is_smaller in zip(ordinals, separation.is_smaller, strict=True) if is_smaller}
        moved = tuple(record for ordinal, record in recent.items() if ordinal in smaller)
        return Alarm(separation.statistic, threshold, moved), smaller, set(ordinals) - smaller

    def _declare(
        self, alarm: Alarm, slot: int, *, known: bool, dropped: int | None, parent: int | None = None
    ) -> Shift:
        """The shift to the regime in `slot`; the segment may move on after it."""
        self._num_shifts += 1
        return Shift(
            kind="inputs",
            number=self._num_shifts,
            regime=self.regimes[slot].number,
            slot=slot,
            known=known,
            previous=self.regimes[self.segment.slot].number,
            declared_at=self.ordinal,
            onset=alarm.records[0].ordinal if alarm.records else self.ordinal,
            statistic=alarm.statistic,
            threshold=alarm.threshold,
            parent=parent,
            dropped=dropped,
        )
