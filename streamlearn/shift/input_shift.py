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

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import ShiftSettings
from streamlearn.shift.change_tests import (
    WINDOWS,
    AbsenceState,
    AbsenceTest,
    Alarm,
    FitDropTest,
    MeanEmbeddingTest,
    RecentRecord,
    ReferenceDistribution,
    RunningStats,
    TokenChange,
    TokenPresenceTest,
    stack_phi,
)
from streamlearn.shift.features import COMMON, DocumentFrequency, Features, add_record, count_records, remove_record
from streamlearn.shift.memory import MATURE, RegimeMemory, RegimeScores, SavedProfiles, count_buckets, log_ratios
from streamlearn.shift.mixture import LIKELY, MIN_PART, UNLIKELY, YOUNG, begin_alike, distinctness, separate

# The newest records of the current segment's regime, and statistics of the segment before them.
#
# A record that leaves the window is settled: it enters the regime's reference distribution for good, and the statistics
# with which the tests compare the window.


# Shape suffixes: B buckets, D features, N records of the window.


SIZE = max(WINDOWS)
"""Records in the window. A segment may begin with more; the window does not grow then."""


@dataclass(frozen=True, eq=False)
class WindowState:
    """What a snapshot keeps of a window; the rest is computed from it."""

    records: tuple[RecentRecord, ...] = ()
    fits_before: RunningStats = field(default_factory=RunningStats)
    """Over the fits of the segment's records before the window."""
    tokens_before: DocumentFrequency = field(default_factory=DocumentFrequency)
    """Over the segment's records before the window."""


class SegmentWindow:
    """The window, with what the tests need of its records: phi, fits and token frequencies."""

    def __init__(self, state: WindowState) -> None:
        self.records = state.records
        self.fits_before = state.fits_before
        self.tokens_before = state.tokens_before
        self.phi_ND = stack_phi(self.records)
        self.fits = [each.fit for each in self.records]
        self.token_records_B = count_records(each.features.buckets for each in self.records)
        """Number of records with each token."""

    @property
    def state(self) -> WindowState:
        """A cheap copy: nothing in it is written to later."""
        return WindowState(self.records, self.fits_before, self.tokens_before)

    def append(self, record: RecentRecord, regimes: RegimeMemory) -> None:
        """Add the newest record; settle the oldest when the window is full."""
        self.records = (*self.records, record)
        self.fits.append(record.fit)
        self.phi_ND = np.concatenate([self.phi_ND, record.features.phi_D[None]])
        add_record(self.token_records_B, record.features.buckets)
        if len(self.records) > SIZE:
            self._settle_oldest(regimes)

    def close(self, moved: Collection[RecentRecord], regimes: RegimeMemory) -> None:
        """Settle the records at the end of the segment, except those moved to the next one."""
        staying = [each for each in self.records if each not in moved]
        phi_ND = stack_phi(staying)
        for i, each in enumerate(staying):
            regimes.settle(each.slot, each.features, each.ordinal, phi_ND[i + 1 :])

    def _settle_oldest(self, regimes: RegimeMemory) -> None:
        oldest, self.records = self.records[0], self.records[1:]
        fit, self.phi_ND = self.fits.pop(0), self.phi_ND[1:]
        remove_record(self.token_records_B, oldest.features.buckets)
        self.tokens_before = self.tokens_before.after(oldest.features.buckets)
        regimes.settle(oldest.slot, oldest.features, oldest.ordinal, self.phi_ND)
        if regimes[oldest.slot].records >= 2 * MATURE:  # the fit of a young regime's records still rises
            self.fits_before = self.fits_before.after(fit)


# The three two-sample tests of a segment's window against the segment before it.
#
# 1. `MeanEmbeddingTest`: the distribution of the inputs changed.
# 2. `FitDropTest`: the tokens fit the regime worse. It separates short inputs, which the first test misses.
# 3. `TokenPresenceTest`: one token appeared or disappeared, which the other two miss.


@dataclass(frozen=True)
class WindowTests:
    """The tests, in order; the first that exceeds its threshold raises the alarm."""

    level: float
    mean_embedding: MeanEmbeddingTest
    fit_drop: FitDropTest
    token_presence: TokenPresenceTest

    @classmethod
    def of(cls, level: float, windows: tuple[int, ...], *, serial_correlation: bool) -> Self:
        """Tests at one level; see `MeanEmbeddingTest` for the arguments."""
        mean_embedding = MeanEmbeddingTest(level, windows, serial_correlation)
        return cls(level, mean_embedding, FitDropTest(level, windows), TokenPresenceTest(level))

    def test(self, window: SegmentWindow, reference: ReferenceDistribution) -> Alarm | None:
        """Test the window; the alarm holds its records from the change point on."""
        if rejection := self.mean_embedding.test(window.phi_ND, reference):
            start = self.mean_embedding.change_point(window.phi_ND, reference)
        elif rejection := self.fit_drop.test(window.fits, window.fits_before):
            start = self.fit_drop.change_point(window.fits, window.fits_before)
        elif change := self.token_presence.test(window.token_records_B, len(window.records), window.tokens_before):
            start = self.token_presence.change_point([each.features.buckets for each in window.records], change)
            return Alarm(change.statistic, change.threshold, window.records[start:], change)
        else:
            return None
        return Alarm(rejection.statistic, rejection.threshold, window.records[start:])


class OtherRecords:
    """At most `SIZE` records; the oldest is settled in its regime's reference distribution when it leaves."""

    def __init__(self, records: tuple[RecentRecord, ...] = ()) -> None:
        self.records = records

    def append(self, record: RecentRecord, regimes: RegimeMemory) -> None:
        """Add the newest record."""
        self.records = (*self.records, record)
        if len(self.records) > SIZE:
            oldest, self.records = self.records[0], self.records[1:]
            following_ND = stack_phi(each for each in self.records if each.slot == oldest.slot)
            regimes.settle(oldest.slot, oldest.features, oldest.ordinal, following_ND)

    def majority_since(self, ordinal: int) -> tuple[RecentRecord, ...]:
        """The records of the most frequent regime from `ordinal` on."""
        run = [each for each in self.records if each.ordinal >= ordinal]
        [(slot, _)] = Counter(each.slot for each in run).most_common(1)
        return tuple(each for each in run if each.slot == slot)

    def remove(self, moved: Collection[RecentRecord]) -> None:
        """Drop records that were moved to the segment's window."""
        self.records = tuple(each for each in self.records if each not in moved)


# The current segment: the part of the stream since the last shift, and the tests for its end.
#
# Records of the segment's regime enter its window, which is compared with the segment before it. Records of other
# regimes are counted by the absence test. Either test may raise an alarm.


NO_SLOT = -1
COOLDOWN = 4
"""Records of the segment's regime after a false alarm before its window is tested again."""


@dataclass(frozen=True, eq=False)
class SegmentState:
    """What a snapshot keeps of the segment."""

    slot: int = NO_SLOT
    """Slot of its regime; `NO_SLOT` before the first record, and after its regime was forgotten."""
    parent: int = NO_SLOT
    """Slot of the regime from which its regime was split, if the segment is the regime's first; else `NO_SLOT`."""
    num_records: int = 0
    """Records of its regime since it began."""
    cooldown: int = 0
    window: WindowState = field(default_factory=WindowState)
    other_records: tuple[RecentRecord, ...] = ()
    absence: AbsenceState = field(default_factory=AbsenceState)
    forgotten: int = 0
    """Number of its regime if that was forgotten, and no record has come since; else 0."""


class Segment:
    """The segment's counters, its window, the records of other regimes, and the tests."""

    def __init__(self, settings: ShiftSettings, regimes: RegimeMemory, tests: WindowTests) -> None:
        self._settings = settings
        self._regimes = regimes
        self._tests = tests
        self._absence = AbsenceTest(tests.level)
        self.load(SegmentState())

    @property
    def state(self) -> SegmentState:
        """The state; cheap, since nothing is copied."""
        return SegmentState(
            slot=self.slot,
            parent=self.parent,
            num_records=self._num_records,
            cooldown=self._cooldown,
            window=self._window.state,
            other_records=self._others.records,
            absence=self._absence.state,
            forgotten=self.forgotten,
        )

    def load(self, state: SegmentState) -> None:
        """Continue from a saved state."""
        self.slot, self.parent = state.slot, state.parent
        self._num_records, self._cooldown = state.num_records, state.cooldown
        self._window = SegmentWindow(state.window)
        self._others = OtherRecords(state.other_records)
        self._absence.state = state.absence
        self.forgotten = state.forgotten

    @property
    def recent_records(self) -> tuple[RecentRecord, ...]:
        """The records that may still be moved to another regime, in stream order."""
        return tuple(sorted((*self._window.records, *self._others.records), key=lambda each: each.ordinal))

    @property
    def other_slots(self) -> set[int]:
        """Slots of the other regimes that recent records belong to."""
        return {each.slot for each in self._others.records}

    def add(self, record: RecentRecord) -> Alarm | None:
        """Add the next record of the stream, and test for the end of the segment."""
        is_own = record.slot == self.slot
        self._absence.update(record.ordinal, own=is_own)
        return self._add_own(record) if is_own else self._add_other(record)

    def cool_down(self) -> None:
        """Suspend the window's tests after a false alarm."""
        self._cooldown = COOLDOWN

    def begin(self, record: RecentRecord) -> None:
        """Begin a segment with a record that comes after none, or after the segment's regime was forgotten."""
        self.slot, self.forgotten = record.slot, 0
        self.add(record)

    def forget(self, slot: int) -> None:
        """Forget the records of the regime in a slot. Where it is the segment's, the next record begins a segment."""
        self._others = OtherRecords(tuple(each for each in self._others.records if each.slot != slot))
        if self.parent == slot:
            self.parent = NO_SLOT
        if self.slot == slot:
            number, others = self._regimes[slot].number, self._others.records
            self.load(SegmentState(other_records=others, forgotten=number))

    def restart(self, slot: int, parent: int, records: Collection[RecentRecord]) -> None:
        """Begin a new segment with some of the recent records, which are its window."""
        newest = self.recent_records[-1].ordinal
        self._window.close(records, self._regimes)
        self._regimes.calibrate()
        self._others.remove(records)
        self._absence.restart([each.ordinal for each in records], newest)
        self.slot, self.parent = slot, parent
        self._num_records, self._cooldown = len(records), 0
        self._window = SegmentWindow(WindowState(tuple(replace(each, slot=slot) for each in records)))

    def split(self, moved: Collection[RecentRecord], new: int) -> None:
        """Move recent records to the regime in `new`, which occurs in between those of their own. The segment goes on.

        Its statistics held the records of both regimes, so they begin anew.
        """
        newest = self.recent_records[-1].ordinal
        staying = tuple(each for each in self._window.records if each not in moved)
        kept = [each for each in self._others.records if each not in moved]
        others = sorted([*kept, *(replace(each, slot=new) for each in moved)], key=lambda each: each.ordinal)
        if len(staying) < len(self._window.records):
            self._num_records, self._cooldown, self.parent = len(staying), 0, NO_SLOT
            self._window = SegmentWindow(WindowState(staying))
            self._absence.restart([each.ordinal for each in staying], newest)
        self._others = OtherRecords()
        for each in others:
            self._others.append(each, self._regimes)

    def _add_own(self, record: RecentRecord) -> Alarm | None:
        self._window.append(record, self._regimes)
        self._num_records += 1
        self._cooldown = max(self._cooldown - 1, 0)
        if not self._settings.enabled or self._cooldown or self._num_records < self._settings.min_dwell_records:
            return None
        return self._tests.test(self._window, self._regimes[self.slot].reference)

    def _add_other(self, record: RecentRecord) -> Alarm | None:
        self._others.append(record, self._regimes)
        if not self._absence.drift_detected:
            return None
        absence = self._absence.state
        return Alarm(absence.statistic, self._absence.threshold, self._others.majority_since(absence.run_start))


MARGIN = 8.0
"""Nats by which another regime must explain a record better than its own to take it."""
MIN_FIT = -2.5
"""Deviations of the lower tail of a regime's fit below which a single record does not belong to it."""
PARENT_MARGIN = 0.25
"""Nats per bucket, in addition to `MARGIN`, by which a young regime's parent must explain a record better."""


@dataclass(frozen=True)
class RecordAssigner:
    """The rule; it holds no state."""

    regimes: RegimeMemory

    def assign(self, record: Features, scores: RegimeScores, here: int, parent: int) -> int:
        """Slot of the record's regime, given the slots of the segment's regime and of the one it was split from."""
        best = int(scores.scores_R.argmax())
        profile = self.regimes[best]
        own_records = self.regimes[here].records
        margin = MARGIN * min(own_records / MATURE, 1.0)  # a young regime has no claim to ambiguous records
        if best == parent and own_records < 2 * MATURE:
            margin = MARGIN + PARENT_MARGIN * len(record.buckets)
        is_clear = scores.scores_R[best] - scores.scores_R[here] > margin and profile.is_mature
        fits = is_clear and profile.tail_fit(float(scores.log_ratios_R[best]), record) > MIN_FIT
        return best if fits else here


# Shape suffixes: B buckets, D features, R regimes.


MIN_RECORDS = 5
"""Records needed to make a regime."""
NEAR = 0.65
"""Maximum distance of records to a regime that returns, in thresholds of the change test. Of the returns of SuperNI's
fifteen tasks without definitions none lies above 0.61, of other tasks' records with the regime as their nearest 7 in
10."""
DISTINCT = 0.0
"""Maximum statistic of the mixture test over the records and a regime's own, if they are the regime's. Of the same
returns none lies above -0.13, of other tasks' records half. Of alarms in the midst of a task, where neighbours are
alike, 45 % lay below in a trial; of 540 boundaries between other SuperNI tasks, 380 of them bare, one still did after
48 records."""
CLEARLY_DISTINCT, LONG = 0.5, 24
"""Statistic above which, or number of records from which on, records are another task's although they begin with the
segment's instruction."""
SEGMENT_CLASSIFIER_MIN_FIT = -1.5
"""Deviations from the usual fit. 1 % of a returning regime's means lie below, and 97 % of other regimes' means."""
MIN_OWN_FIT = -0.8
"""The same for records that raised an alarm; bursts of the segment's own regime lie above 0."""


@dataclass(frozen=True)
class Classification:
    """What the records of an alarm are."""

    slot: int
    """Slot of the regime that explains them best."""
    known: bool
    """Whether it explains them as well as its own records; otherwise they are a new regime's."""
    records: tuple[RecentRecord, ...]


@dataclass(frozen=True)
class SegmentClassifier:
    """The rules; it holds no state. `here` is the slot of the segment's regime."""

    regimes: RegimeMemory
    test: MeanEmbeddingTest

    def classify(self, alarm: Alarm, recent: tuple[RecentRecord, ...], here: int) -> Classification:
        """Classify the records of an alarm.

        1. Where a token appeared or disappeared, they have left the segment's regime.
        2. Records of the segment that are not another known regime's are reduced to those that its regime does not
           explain, out of all `recent` records.
        3. If fewer than `MIN_RECORDS` are left, they are the segment's after all.
        4. So they are if no known regime explains them, but they are no more distinct from the segment's other records
           than topics of one task are (`_are_topics`).
        """
        if alarm.token_change:  # 1.
            return self._classify_token_change(alarm.records, alarm.token_change, here)
        found = self._likeliest(alarm.records, here)
        if alarm.records[0].slot == here and (not found.known or found.slot == here):
            unexplained = self._unexplained(alarm.records, recent, here)  # 2.
            if len(unexplained) < MIN_RECORDS:
                return Classification(here, True, unexplained)  # 3.
            found = self._likeliest(unexplained, here)
            if not found.known and self._are_topics(unexplained, recent, here):
                return Classification(here, True, unexplained)  # 4.
        return found

    def _likeliest(self, records: tuple[RecentRecord, ...], here: int) -> Classification:
        """The regime with the largest score, by tokens and length."""
        scores = self._score(records)
        slot = int(np.sum([each.scores_R for each in scores], axis=0).argmax())
        profile = self.regimes[slot]
        pairs = zip(scores, records, strict=True)
        fits = [profile.fit(float(score.log_ratios_R[slot]), each.features) for score, each in pairs]
        if slot == here:
            return Classification(slot, float(np.mean(fits)) > MIN_OWN_FIT, records)
        explained = float(np.mean(fits)) > SEGMENT_CLASSIFIER_MIN_FIT and self._is_near(records, slot)
        if explained:
            distinct = self._distinctness(records, self.regimes[slot].exemplars)
            explained = distinct is None or distinct <= DISTINCT
        return Classification(slot, explained, records)

    def _classify_token_change(
        self, records: tuple[RecentRecord, ...], change: TokenChange, here: int
    ) -> Classification:
        """The regime with the largest score, by tokens, length and the frequency of the token that changed."""
        frequency_R = self._token_frequency(change.bucket, records)
        agreeing_R = frequency_R if change.appeared else 1 - frequency_R
        scores_R = np.sum([each.scores_R for each in self._score(records)], axis=0) + len(records) * np.log(agreeing_R)
        slot = int(scores_R.argmax())
        agrees = slot != here and float(agreeing_R[slot]) > COMMON
        return Classification(slot, agrees and self._is_near(records, slot), records)

    def _unexplained(
        self, suspects: tuple[RecentRecord, ...], recent: tuple[RecentRecord, ...], here: int
    ) -> tuple[RecentRecord, ...]:
        """The recent records that explain each other better than their regimes do.

        Records from the change point on (`suspects`) need no clear evidence; records before it and records of another
        regime do.
        """
        chosen = suspects
        for _ in range(3):
            chosen_B = _count(chosen)
            found = tuple(
                each
                for each in recent
                if self._evidence(each, chosen_B, here, inside=each in chosen)
                > (-MARGIN if each in suspects else MARGIN)
            )
            if found == chosen or not found:
                return found
            chosen = found
        return chosen

    def _score(self, records: Sequence[RecentRecord]) -> list[RegimeScores]:
        """Scores of each record, as if none of them had been counted."""
        slots = {each.slot for each in records}
        excluded = {slot: _count([each for each in records if each.slot == slot]) for slot in slots}
        return [self.regimes.score(each.features, excluded) for each in records]

    def _token_frequency(self, bucket: int, records: Sequence[RecentRecord]) -> NDArray[np.float32]:
        """Share of each regime's records with the token, as if `records` had not been counted; never 0 or 1."""
        frequencies = {slot: self.regimes[slot].token_frequency for slot in self.regimes.occupied}
        for each in records:
            frequencies[each.slot] = frequencies[each.slot].without(each.features.buckets)
        shares_R = np.full(len(self.regimes), 0.5, dtype=np.float32)  # of a vacant slot, whose score is -inf
        for slot, frequency in frequencies.items():
            shares_R[slot] = frequency.expected[bucket]
        return shares_R

    def _is_near(self, records: Sequence[RecentRecord], slot: int) -> bool:
        """Whether the change test takes the records for the regime's, or none of its own is settled yet."""
        reference = self.regimes[slot].reference
        if reference.num_records < 2:
            return True
        mean_D = np.mean([each.features.phi_D for each in records], axis=0)
        return self.test.distance(mean_D, len(records), reference) < NEAR * self.test.threshold(reference)

    def _are_topics(self, records: Sequence[RecentRecord], recent: Sequence[RecentRecord], here: int) -> bool:
        """Whether records are no more distinct from the segment's others than topics of one task are.

        Those that begin with the same instruction as the others are another task's only if they are clearly distinct,
        or go on for long. False if the segment has too few others to tell.
        """
        others = [each.features.buckets for each in recent if each.slot == here and each not in records]
        own = (*self.regimes[here].exemplars, *others)
        distinct = self._distinctness(records, own)
        if distinct is None or distinct > CLEARLY_DISTINCT:
            return False
        if distinct <= DISTINCT:
            return True
        return len(records) < LONG and begin_alike([*(each.features.buckets for each in records), *own])

    @staticmethod
    def _distinctness(records: Sequence[RecentRecord], own: Sequence[NDArray[np.uint16]]) -> float | None:
        """How clearly the mixture test would split these records from a regime's own; None if it has too few.

        A regime of many topics explains records of any topic.
        """
        if len(own) < MIN_PART:
            return None
        return distinctness([each.features.buckets for each in records], own)

    def _evidence(self, record: RecentRecord, chosen_B: NDArray[np.float32], here: int, *, inside: bool) -> float:
        """Nats by which the chosen records explain a record better than its regime does, itself not counted."""
        own_B = count_buckets(record.features.buckets)
        old_B = self.regimes[record.slot].counts_B
        if record.slot == here:
            old_B = old_B - chosen_B  # counted in the segment's regime; in another they are too few to matter
        if not inside or record.slot != here:
            old_B = old_B - own_B
        new_B = chosen_B - own_B if inside else chosen_B
        pair_2B = np.maximum(np.stack([new_B, old_B]), 0.0)
        new, old = log_ratios(pair_2B[:, record.features.buckets], pair_2B.sum(axis=1))
        return float(new - old)


def _count(records: Sequence[RecentRecord]) -> NDArray[np.float32]:
    return count_buckets(np.concatenate([each.features.buckets for each in records]))


@dataclass(frozen=True)
class RefusedReturn:
    """The shift declared at one record, which must not be to the regime in one slot."""

    declared_at: int
    """Ordinal of the record at which the shift is declared."""
    slot: int
    """Slot of the regime that does not return."""


@dataclass(frozen=True)
class RefusedRecord:
    """A single record, which must not be assigned to the regime in one slot."""

    ordinal: int
    slot: int
    """Slot of the regime that the record is not of."""


@dataclass(frozen=True, eq=False)
class DetectorState:
    """Everything that later decisions depend on. Nothing in it is written to; profiles are shared while unchanged."""

    ordinal: int = 0
    """Records received."""
    num_shifts: int = 0
    segment: SegmentState = field(default_factory=SegmentState)
    regimes: SavedProfiles = ()
    next_number: int = 1
    """Number of the next new regime."""
    refused: tuple[RefusedReturn, ...] = ()
    """Returns that are still to be declared, and then are not returns."""
    refused_records: tuple[RefusedRecord, ...] = ()
    """Records that are still to be read, and then are not of the regime that they look like."""

    @property
    def numbers(self) -> dict[int, int]:
        """Number of each regime, by slot."""
        return {slot: profile.number for slot, profile in enumerate(self.regimes) if profile is not None}


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
    """Number of the regime that it was split from, which goes on beside it; None if the stream moved to it."""
    dropped: int | None = None
    """Number of the regime that was dropped, or merged into another, to free the slot."""

    def to_json(self) -> dict[str, Any]:
        """Fields by name, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(**fields)


@dataclass(frozen=True)
class AssignedRecord:
    """A record's regime, and the shifts that were declared at it."""

    slot: int
    shifts: tuple[Shift, ...] = ()
    reassigned: tuple[tuple[int, int], ...] = ()
    """Ordinal and new slot of each record that a shift moves to its regime; the last one counts."""


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


@dataclass(frozen=True, eq=False)
class MonitorState:
    """The monitor after it read one batch, decided what it could, and before it read the next."""

    detector: DetectorState = field(default_factory=DetectorState)
    undecided: tuple[tuple[int, ...], ...] = ()
    """Slots of each batch that was undecided then. Older releases also list those that the batch just read decided."""


class Assignment(NamedTuple):
    """The likeliest regime of an input, and how well it explains the input."""

    slot: int
    """Slot of the likeliest regime."""
    p_value: float
    """Share of the regimes' own records that are explained no better, 0 to 1 (`NoveltyTest`); 1 before a regime has
    enough records to compare with."""
