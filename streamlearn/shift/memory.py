"""The memory of regimes: at most `max_regimes` profiles, each in a slot.

When a new regime needs a slot and none is free, two regimes that the change test cannot tell apart are merged. Where
all pairs differ, the regime of least worth is dropped:

    worth = records / (1 + records seen since its last)                                                     (1)

The segment's regime and regimes of records that are held back are never dropped or merged.

A regime that an operator drops leaves its slot vacant: no record is assigned to it, and the next new regime takes it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.change_tests import MeanEmbeddingTest, ReferenceDistribution
from streamlearn.shift.features import COMMON, NUM_BUCKETS, DocumentFrequency, Features
from streamlearn.shift.mixture import MIN_TESTED

# Naive Bayes over hashed tokens: which regime a single record belongs to.
#
#     p_b = (sum over regimes of c_rb / c_r, + 1 / B) / (R + 1)                                               (1)
#     w_r = sum_(b in record) log((c_rb + a p_b) / (c_r + a)) - log p_b                                       (2)
#     score_r = w_r + log N(log length; mu_r, sigma_r)                                                        (3)
#     m_r = max(sum_(b in C, not in record) log(1 - s_rb), -8)                                                (4)
#
# c_rb counts bucket b in regime r. Counts are smoothed with a = 1000 tokens of the background p, so a token that a
# regime
# happens not to have had yet does not decide. The uniform part of p makes eq. (2) informative while there is only one
# regime. w_r per bucket is how much better regime r explains a record than the background does: the topic of the record
# cancels, and apart from a little noise the value is the same for all records of a regime (`RegimeProfile.fit`).
#
# Absent tokens separate "is there a" from "is there not a": s_rb is the share of regime r's records that have bucket b,
# and C holds the buckets that most records of some regime have (`COMMON`). A record classified by itself goes to the
# regime with the largest sum of (3) and (4). A record of no known regime lacks the tokens of all of them; the bound in
# (4) leaves it to (3). In the stream (3) decides without (4), because tokens that appear and disappear have a test of
# their own (`TokenPresenceTest`).


# Shape suffixes: B buckets, R regimes, T buckets of a record.


SMOOTHING = 1000.0
MAX_ABSENCE_PENALTY = 8.0
"""Nats; the bound in eq. (4)."""
_MIN_DEVIATION = 0.1  # of the logarithm of the length: a tenth longer is never a surprise


def log_ratios(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32]) -> NDArray[np.float32]:
    """Eq. (2) for every regime, in nats, from the counts of the record's buckets."""
    result: NDArray[np.float32] = np.log(c_RT / _background(c_RT, totals_R) + np.float32(SMOOTHING)).sum(axis=1)
    result -= np.float32(c_RT.shape[1]) * np.log(totals_R + np.float32(SMOOTHING))
    return result


def bucket_log_ratios(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32], regime: int) -> NDArray[np.float32]:
    """The terms of eq. (2) for one regime, bucket by bucket."""
    result: NDArray[np.float32] = np.log(c_RT[regime] / _background(c_RT, totals_R) + np.float32(SMOOTHING))
    result -= np.log(totals_R + np.float32(SMOOTHING))[regime]
    return result


def _background(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32]) -> NDArray[np.float32]:
    """Eq. (1)."""
    p_T: NDArray[np.float32] = np.reciprocal(np.maximum(totals_R, np.float32(1.0))) @ c_RT
    p_T += np.float32(1 / NUM_BUCKETS)
    p_T /= np.float32(len(c_RT) + 1)
    return p_T


def length_scores(
    record: Features, mean_R: NDArray[np.float32], deviation_R: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The second term of eq. (3), without its constant."""
    z_R = (np.float32(record.log_length) - mean_R) / deviation_R
    result: NDArray[np.float32] = -0.5 * z_R**2 - np.log(deviation_R)
    return result


@dataclass(frozen=True)
class AbsentTokens:
    """Eq. (4) for every regime, precomputed."""

    terms_RB: NDArray[np.float32]
    """log(1 - s_rb); 0 outside C."""
    totals_R: NDArray[np.float32]
    """The sum for a record without any of the tokens."""

    @classmethod
    def of(cls, frequency_RB: NDArray[np.float32]) -> Self:
        """Precompute eq. (4) from the s_rb, all above 0 and below 1."""
        terms_RB = np.where((frequency_RB >= COMMON).any(axis=0), np.log1p(-frequency_RB), np.float32(0.0))
        return cls(terms_RB, terms_RB.sum(axis=1))

    def scores(self, buckets: NDArray[np.uint16]) -> NDArray[np.float32]:
        """m_r for every regime, in nats."""
        sum_R = self.totals_R - self.terms_RB[:, np.unique(buckets)].sum(axis=1)
        result: NDArray[np.float32] = np.maximum(sum_R, np.float32(-MAX_ABSENCE_PENALTY))
        return result


def count_buckets(buckets: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Number of occurrences of each bucket."""
    return np.bincount(buckets, minlength=NUM_BUCKETS).astype(np.float32)


def length_deviation(total: float, squares: float, number: float) -> float:
    """The sigma of eq. (3) from sums, with a prior of two records at a deviation of 0.5."""
    mean = total / max(number, 1.0)
    variance = (max(squares - number * mean**2, 0.0) + 2 * 0.25) / (number + 2)
    return float(max(variance**0.5, _MIN_DEVIATION))


MATURE = 32
"""Records after which a regime's profile is reliable enough to claim records from another."""
NUM_SAMPLED = 32
"""Records kept token by token, exemplars of how well the regime explains its own. With the recent ones they are about
64, which `mixture_test` needs to tell 20 tasks apart; with more, it would also divide single tasks by their topics."""
MIN_TEST_INTERVAL, MAX_TEST_INTERVAL = 16, 128
"""Bounds of the records between two tests for a mixture."""
FIT_PRIOR = 2.0
"""Weight of FIT_DEVIATION, in exemplars."""
FIT_DEVIATION = 0.1
"""Prior standard deviation of a record's log ratio per bucket, nats."""
LOW, LOW_DEVIATIONS = 0.1, 1.2816
"""A quantile of the lower tail, and how many deviations below the median a Gaussian has it."""
MAX_TOKENS = float(1 << 21)
"""Counts above are halved: below 2^24 they are exact in float32, and old tokens fade."""
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio

SCALARS = (
    "number",
    "visits",
    "records",
    "first_record",
    "last_record",
    "tokens",
    "length_sum",
    "length_squares",
    "fit_center",
    "fit_scale",
)
"""Fields that a snapshot keeps as one row of float64, exact for integers below 2^53."""
ADDED_SCALARS = ("is_separated", "next_test", "fit_tail")
"""Those that snapshots keep since 0.2.0."""


class SampledRecord(NamedTuple):
    """What is kept of a record."""

    buckets: NDArray[np.uint16]
    log_length: float
    ordinal: int


@dataclass(eq=False)
class RegimeProfile:
    """One regime: its token counts, its reference distribution, and when it occurred."""

    number: int
    first_record: int
    counts_B: NDArray[np.float32] = field(default_factory=lambda: np.zeros(NUM_BUCKETS, dtype=np.float32))
    reference: ReferenceDistribution = field(default_factory=ReferenceDistribution)
    token_frequency: DocumentFrequency = field(default_factory=DocumentFrequency)
    sample: tuple[SampledRecord, ...] = ()
    """A uniform sample of the settled records."""
    visits: int = 1
    records: int = 0
    last_record: int = 0
    tokens: float = 0.0
    length_sum: float = 0.0
    length_squares: float = 0.0
    fit_center: float = 0.0
    fit_scale: float = 1.0
    fit_tail: float = 1.0
    """Deviation of the lower tail, at least `fit_scale`: single records of a task fit it badly more often than a
    Gaussian's would."""
    is_separated: int = 0
    """1 if its records were told apart from another regime's one by one (`mixture_test`)."""
    next_test: int = MIN_TESTED
    """Number of records at which it is tested next for being a mixture."""

    def copy(self) -> Self:
        """An independent copy."""
        return replace(self, counts_B=self.counts_B.copy(), reference=self.reference.copy())

    def add(self, record: Features, ordinal: int) -> None:
        """Count the record's tokens and length."""
        self._count(record.buckets, record.log_length)
        self.last_record = max(self.last_record, ordinal)
        if self.tokens > MAX_TOKENS:
            self.counts_B /= 2
            self.tokens /= 2

    def remove(self, record: Features) -> None:
        """Undo `add`, for a record that turns out to belong to another regime."""
        self.counts_B -= count_buckets(record.buckets)
        self.token_frequency = self.token_frequency.without(record.buckets)
        self._add_scalars(record.buckets, record.log_length, -1)
        np.maximum(self.counts_B, 0.0, out=self.counts_B)  # below 0 only if the counts were halved in between

    def offer(self, record: Features, ordinal: int) -> None:
        """Add the record to the sample with some probability, so that the sample is uniform."""
        place = len(self.sample)
        if len(self.sample) == NUM_SAMPLED:
            place = ((self.number << 32) + self.records) * _MIX % (1 << 64) * max(self.records, 1) >> 64
        if place < NUM_SAMPLED:
            kept = list(self.sample)
            kept[place : place + 1] = [SampledRecord(record.buckets, record.log_length, ordinal)]
            self.sample = tuple(kept)

    @property
    def exemplars(self) -> tuple[NDArray[np.uint16], ...]:
        """The tokens of the sample, which measure how well the regime explains its own records."""
        return tuple(each.buckets for each in self.sample)

    @property
    def is_mature(self) -> bool:
        """Whether the profile is reliable enough to claim records from another regime."""
        return bool(self.is_separated) or self.records >= MATURE

    def postpone_test(self) -> None:
        """Test for a mixture again when there are half as many records more, within the bounds of the interval."""
        self.next_test = self.records + min(max(self.records // 2, MIN_TEST_INTERVAL), MAX_TEST_INTERVAL)

    def start_over(self, sample: Sequence[SampledRecord]) -> None:
        """Forget all records but some of the sample: the others are not known to be the regime's."""
        self.sample, self.is_separated, self.next_test = tuple(sample), 1, MIN_TESTED
        self.counts_B[:] = 0.0
        self.reference, self.token_frequency = ReferenceDistribution(), DocumentFrequency()
        self.records, self.tokens, self.length_sum, self.length_squares = 0, 0.0, 0.0, 0.0
        for each in sample:
            self._count(each.buckets, each.log_length)

    def fit(self, log_ratio: float, record: Features) -> float:
        """Deviations by which a record's log ratio per bucket exceeds that of the regime's own records."""
        return (log_ratio / len(record.buckets) - self.fit_center) / self.fit_scale

    def tail_fit(self, log_ratio: float, record: Features) -> float:
        """The same in deviations of the lower tail, to judge one record by itself."""
        return (log_ratio / len(record.buckets) - self.fit_center) / self.fit_tail

    def calibrate(self, exemplar_fits: NDArray[np.float64]) -> None:
        """Set the usual fit: median, robust deviation and lower tail of the exemplars' log ratios per bucket."""
        self.fit_center = float(np.median(exemplar_fits))
        robust = 1.4826 * float(np.median(np.abs(exemplar_fits - self.fit_center)))
        tail = (self.fit_center - float(np.quantile(exemplar_fits, LOW))) / LOW_DEVIATIONS
        self.fit_scale = _with_prior(robust, len(exemplar_fits))
        self.fit_tail = max(self.fit_scale, _with_prior(tail, len(exemplar_fits)))

    @property
    def length_mean(self) -> float:
        """Mean of the logarithm of the length."""
        return self.length_sum / max(self.records, 1)

    @property
    def length_deviation(self) -> float:
        """Standard deviation of the logarithm of the length."""
        return length_deviation(self.length_sum, self.length_squares, self.records)

    def merge(self, other: "RegimeProfile") -> None:
        """Add the records of another regime; number, first record and usual fit stay."""
        self.counts_B += other.counts_B
        for name in ("visits", "records", "tokens", "length_sum", "length_squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_record = max(self.last_record, other.last_record)
        self.reference.merge(other.reference)
        self.token_frequency = self.token_frequency.merged(other.token_frequency)
        self.sample = (*self.sample, *other.sample)[:NUM_SAMPLED]

    def _count(self, buckets: NDArray[np.uint16], log_length: float) -> None:
        self.counts_B += count_buckets(buckets)
        self.token_frequency = self.token_frequency.after(buckets)
        self._add_scalars(buckets, log_length, 1)

    def _add_scalars(self, buckets: NDArray[np.uint16], log_length: float, number: int) -> None:
        self.tokens += number * len(buckets)
        self.records += number
        self.length_sum += number * log_length
        self.length_squares += number * log_length**2


def _with_prior(deviation: float, number: int) -> float:
    """A deviation of `number` exemplars' fits, weighted with the prior one."""
    return float(((number * deviation**2 + FIT_PRIOR * FIT_DEVIATION**2) / (number + FIT_PRIOR)) ** 0.5)


# Shape suffixes: B buckets, O occupied slots, R slots, T buckets of a record.


CALIBRATED_AT = frozenset(1 << power for power in range(2, 20))
"""Numbers of settled records at which a regime's fit is calibrated, in addition to every shift."""
INDISTINGUISHABLE = 1.5
"""Two profiles are one regime's if their statistic is below: 1 is expected then, and 2 separates real tasks."""


class RegimeScores(NamedTuple):
    """A record's scores under the regime of every slot, in nats; -inf for a vacant slot."""

    log_ratios_R: NDArray[np.float32]
    """Eq. (2) of `naive_bayes`: tokens only."""
    scores_R: NDArray[np.float32]
    """Eq. (3): tokens and length. The largest belongs to the likeliest regime."""


SavedProfiles = tuple[RegimeProfile | None, ...]
"""A copy of the memory by slot, None for a vacant one. Its profiles are never written to; copies share a profile while
it does not change."""


class RegimeMemory:
    """Profiles by slot; the lowest free slot is taken first."""

    def __init__(self, max_regimes: int) -> None:
        self._max_regimes = max_regimes
        self._counts_RB = np.zeros((max_regimes, NUM_BUCKETS), dtype=np.float32)
        self._columns = np.zeros((3, max_regimes), dtype=np.float32)  # tokens, length mean, length deviation
        self._profiles: list[RegimeProfile | None] = []
        self._vacant: list[int] = []
        """Slots below the length that have no profile, in order."""
        self._saved: list[RegimeProfile | None] = []
        """The copy of each profile that `save` returned last; None if it has changed since, or the slot is vacant."""
        self._next_number = 1

    def __len__(self) -> int:
        """Number of slots in use so far, vacant ones among them."""
        return len(self._profiles)

    def __getitem__(self, slot: int) -> RegimeProfile:
        profile = self._profiles[slot]
        assert profile is not None, f"slot {slot} is vacant"
        return profile

    @property
    def occupied(self) -> list[int]:
        """Slots that have a regime, in order."""
        return [slot for slot, profile in enumerate(self._profiles) if profile is not None]

    def log_ratios(
        self, buckets: NDArray[np.uint16], excluded: Mapping[int, NDArray[np.float32]] | None = None
    ) -> NDArray[np.float32]:
        """Eq. (2) of `naive_bayes` under every regime, with the token counts in `excluded`, by slot, subtracted."""
        used = len(self)
        totals_R = self._columns[0, :used]
        c_RT = self._counts_RB[:used].take(buckets, axis=1)
        for slot, counts_B in (excluded or {}).items():
            c_RT[slot] = np.maximum(c_RT[slot] - counts_B[buckets], 0.0)
            totals_R = np.where(np.arange(used) == slot, totals_R - counts_B.sum(), totals_R)
        if not self._vacant:
            return log_ratios(c_RT, totals_R)
        log_ratios_R = np.full(used, -np.inf, dtype=np.float32)
        log_ratios_R[self.occupied] = log_ratios(c_RT[self.occupied], totals_R[self.occupied])
        return log_ratios_R

    def score(self, record: Features, excluded: Mapping[int, NDArray[np.float32]] | None = None) -> RegimeScores:
        """Score a record under every regime; `excluded` is that of `log_ratios`."""
        _, mean_R, deviation_R = self._columns[:, : len(self)]
        log_ratios_R = self.log_ratios(record.buckets, excluded)
        return RegimeScores(log_ratios_R, log_ratios_R + length_scores(record, mean_R, deviation_R))

    def rank(self, records: Iterable[Features]) -> list[int]:
        """Slots of all regimes, the one that explains the records best first (`naive_bayes`, eq. 3)."""
        total_R = np.sum([self.score(each).scores_R for each in records], axis=0)
        return [int(slot) for slot in np.argsort(-total_R, kind="stable") if slot not in self._vacant]

    def calibrate(self, slots: Iterable[int] | None = None) -> None:
        """Measure how well the regimes, by default all, explain their own exemplars."""
        for slot in self.occupied if slots is None else slots:
            if exemplars := self[slot].exemplars:
                self[slot].calibrate(self.exemplar_fits(slot, exemplars))
                self._saved[slot] = None

    def exemplar_fits(self, slot: int, exemplars: Sequence[NDArray[np.uint16]]) -> NDArray[np.float64]:
        """Log ratios per bucket of records of a regime, each as if it had not been counted."""
        c_RT = self._counts_RB[: len(self)].take(np.concatenate(exemplars), axis=1)
        own_T = np.concatenate([count_buckets(buckets)[buckets] for buckets in exemplars])
        c_RT[slot] = np.maximum(c_RT[slot] - own_T, 0.0)
        totals_R, row = self._columns[0, : len(self)], slot
        if self._vacant:
            c_RT, totals_R, row = c_RT[self.occupied], totals_R[self.occupied], self.occupied.index(slot)
        terms_T = bucket_log_ratios(c_RT, totals_R, row)
        ends = np.cumsum([len(buckets) for buckets in exemplars])
        return np.array([part.mean(dtype=np.float64) for part in np.split(terms_T, ends[:-1])])

    def add(self, slot: int, record: Features, ordinal: int) -> None:
        """Count a record in a slot."""
        self[slot].add(record, ordinal)
        self._changed(slot)

    def move(self, record: Features, ordinal: int, old: int, new: int) -> None:
        """Move a record from one slot to another."""
        if old != new:
            self[old].remove(record)
            self._changed(old)
            self.add(new, record, ordinal)

    def postpone_test(self, slot: int) -> None:
        """The regime is no mixture, as far as its records show."""
        self[slot].postpone_test()
        self._saved[slot] = None

    def mark_separated(self, slots: Iterable[int]) -> None:
        """Each record of these regimes was told from the others'."""
        for slot in slots:
            self[slot].is_separated = 1
            self._saved[slot] = None

    def divide(self, slot: int, new: int, moved: Collection[int], ordinal: int) -> None:
        """Divide the sample of a regime between it and the one in `new`; both start over with their part.

        Their recent records must be added again.

        Args:
            slot: The regime's slot.
            new: The slot of a new regime.
            moved: Ordinals of the records that become the new one's.
            ordinal: That of the newest record.
        """
        sample = self[slot].sample
        for each, is_new in ((slot, False), (new, True)):
            self[each].start_over([record for record in sample if (record.ordinal in moved) == is_new])
            self[each].last_record = ordinal
            self._changed(each)

    def settle(self, slot: int, record: Features, ordinal: int, following_ND: NDArray[np.float32]) -> None:
        """Add a record to the slot's reference distribution for good, and offer it to its sample."""
        profile = self[slot]
        profile.reference.add(record.phi_D, following_ND)
        profile.offer(record, ordinal)
        self._saved[slot] = None
        if profile.reference.num_records in CALIBRATED_AT:
            self.calibrate([slot])

    def revisit(self, slot: int) -> None:
        """Count a return of the regime."""
        self[slot].visits += 1
        self._saved[slot] = None

    def create(self, ordinal: int, protected: Collection[int]) -> tuple[int, int | None] | None:
        """Create a regime whose first record is `ordinal`.

        Returns:
            Its slot, and the number of the regime that was dropped or merged to free it. None if all slots are taken
            and `protected`.
        """
        dropped = None
        if self._vacant:
            slot = self._vacant.pop(0)
        elif len(self) < self._max_regimes:
            slot = len(self)
            self._profiles.append(None)
            self._saved.append(None)
        else:
            freed = self._make_room(ordinal, protected)
            if freed is None:
                return None
            slot, dropped = freed, self[freed].number
        self._counts_RB[slot] = 0.0
        self._profiles[slot] = RegimeProfile(self._next_number, ordinal, counts_B=self._counts_RB[slot])
        self._next_number += 1
        self._changed(slot)
        return slot, dropped

    def forget(self, slot: int) -> None:
        """Leave the slot vacant. Its records must be in no segment."""
        self._profiles[slot] = self._saved[slot] = None
        self._vacate(slot)

    def save(self) -> SavedProfiles:
        """Return a copy; only profiles that changed since the last call are copied."""
        for slot, profile in enumerate(self._profiles):
            if self._saved[slot] is None and profile is not None:
                self._saved[slot] = profile.copy()
        return tuple(self._saved)

    def load(self, profiles: SavedProfiles, next_number: int) -> None:
        """Restore what `save` returned."""
        self._counts_RB[:] = 0.0
        self._profiles, self._saved, self._next_number = [], [], next_number
        self._vacant = []
        for slot, each in enumerate(profiles):
            self._profiles.append(None)
            self._saved.append(each)
            if each is None:
                self._vacate(slot)
                continue
            self._counts_RB[slot] = each.counts_B
            self._profiles[slot] = replace(each, counts_B=self._counts_RB[slot], reference=each.reference.copy())
            self._refresh(slot)

    @property
    def next_number(self) -> int:
        """Number of the next new regime."""
        return self._next_number

    def _make_room(self, ordinal: int, protected: Collection[int]) -> int | None:
        """Merge or drop a regime and return its slot."""
        candidates = [slot for slot in self.occupied if slot not in protected]
        if not candidates:
            return None
        if pair := self._indistinguishable_pair(candidates):
            kept, merged = pair
            self[kept].merge(self[merged])
            self._changed(kept)
            return merged
        return min(candidates, key=lambda slot: self._worth(slot, ordinal))

    def _worth(self, slot: int, ordinal: int) -> float:
        """Eq. (1)."""
        profile = self[slot]
        return profile.records / (1 + ordinal - profile.last_record)

    def _indistinguishable_pair(self, candidates: list[int]) -> tuple[int, int] | None:
        """The two closest slots, the older regime first, if the change test takes them for one regime."""
        test = MeanEmbeddingTest(level=0.5)
        best: tuple[float, int, int] = (INDISTINGUISHABLE, -1, -1)
        for i, one in enumerate(candidates):
            for other in candidates[i + 1 :]:
                a, b = self[one].reference, self[other].reference
                if min(a.num_records, b.num_records) < 2:
                    continue
                distance = test.distance(b.mean.astype(np.float32), int(b.num_records), a)
                best = min(best, (distance, one, other))
        if best[1] < 0:
            return None
        one, other = sorted(best[1:], key=lambda slot: self[slot].number)
        return one, other

    def _vacate(self, slot: int) -> None:
        self._vacant = sorted([*self._vacant, slot])
        self._counts_RB[slot] = 0.0
        self._columns[:, slot] = 0.0, 0.0, 1.0  # any deviation above 0: the score is -inf

    def _changed(self, slot: int) -> None:
        self._saved[slot] = None
        self._refresh(slot)

    def _refresh(self, slot: int) -> None:
        profile = self[slot]
        self._columns[:, slot] = profile.tokens, profile.length_mean, profile.length_deviation
