"""The memory of regimes: at most `max_regimes` profiles, each in a slot, and the classifier of single records.

When a new regime needs a slot and none is free, two regimes that the change test cannot tell apart are merged. If all
pairs differ, the regime of least worth is dropped:

    worth = records / (1 + records seen since its last)                                                     (1)

The segment's regime and regimes of records that are held back are never dropped or merged. A regime that an operator
drops leaves its slot vacant: no record is assigned to it, and the next new regime takes it.

Naive Bayes over hashed tokens tells which regime a single record belongs to:

    p_b = (sum over regimes of c_rb / c_r, + 1 / B) / (R + 1)                                               (2)
    w_r = sum_(b in record) log((c_rb + a p_b) / (c_r + a)) - log p_b                                       (3)
    score_r = w_r + log N(log length; mu_r, sigma_r)                                                        (4)
    m_r = max(sum_(b in C, not in record) log(1 - s_rb), -8)                                                (5)

c_rb counts bucket b in regime r. Counts are smoothed with a = 1000 tokens of the background p, so a token that a regime
happens not to have had yet does not decide. The uniform part of p makes eq. (3) informative while there is only one
regime. w_r per bucket is how much better regime r explains a record than the background does: the topic of the record
cancels, and apart from a little noise the value is the same for all records of a regime (`RegimeProfile.fit`).

Absent tokens separate "is there a" from "is there not a": s_rb is the share of regime r's records that have bucket b,
and C holds the buckets that most records of some regime have (`COMMON`). A record classified by itself goes to the
regime with the largest sum of (4) and (5). A record of no known regime lacks the tokens of all of them; the bound in
(5) leaves it to (4). In the stream (4) decides without (5), because tokens that appear and disappear have a test of
their own (`token_presence_test`).
"""
# Shape suffixes: B buckets, O occupied slots, R regimes or slots, T buckets of a record.

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.change_tests import RecentRecord
from streamlearn.shift.features import COMMON, NUM_BUCKETS, DocumentFrequency, Features
from streamlearn.shift.mixture import MIN_TESTED
from streamlearn.shift.reference import IDENTITY, Metric, Reference, ReferenceDistribution, pooled_metric

SMOOTHING = 1000.0
MAX_ABSENCE_PENALTY = 8.0
"""Nats; the bound in eq. (5)."""
_MIN_DEVIATION = 0.1  # of the logarithm of the length: a tenth longer is never a surprise


def log_ratios(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32]) -> NDArray[np.float32]:
    """Eq. (3) for every regime, in nats, from the counts of the record's buckets."""
    result: NDArray[np.float32] = np.log(c_RT / _background(c_RT, totals_R) + np.float32(SMOOTHING)).sum(axis=1)
    result -= np.float32(c_RT.shape[1]) * np.log(totals_R + np.float32(SMOOTHING))
    return result


def bucket_log_ratios(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32], regime: int) -> NDArray[np.float32]:
    """The terms of eq. (3) for one regime, bucket by bucket."""
    result: NDArray[np.float32] = np.log(c_RT[regime] / _background(c_RT, totals_R) + np.float32(SMOOTHING))
    result -= np.log(totals_R + np.float32(SMOOTHING))[regime]
    return result


def _background(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32]) -> NDArray[np.float32]:
    """Eq. (2)."""
    p_T: NDArray[np.float32] = np.reciprocal(np.maximum(totals_R, np.float32(1.0))) @ c_RT
    p_T += np.float32(1 / NUM_BUCKETS)
    p_T /= np.float32(len(c_RT) + 1)
    return p_T


def length_scores(
    record: Features, mean_R: NDArray[np.float32], deviation_R: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The second term of eq. (4), without its constant."""
    z_R = (np.float32(record.log_length) - mean_R) / deviation_R
    result: NDArray[np.float32] = -0.5 * z_R**2 - np.log(deviation_R)
    return result


class AbsentTokens:
    """Eq. (5) for every regime, precomputed from the s_rb, all above 0 and below 1."""

    def __init__(self, frequency_RB: NDArray[np.float32]) -> None:
        is_common_B = (frequency_RB >= COMMON).any(axis=0)
        self._terms_RB = np.where(is_common_B, np.log1p(-frequency_RB), np.float32(0.0))
        self._totals_R = self._terms_RB.sum(axis=1)

    def scores(self, buckets: NDArray[np.uint16]) -> NDArray[np.float32]:
        """m_r for every regime, in nats."""
        sum_R = self._totals_R - self._terms_RB[:, np.unique(buckets)].sum(axis=1)
        result: NDArray[np.float32] = np.maximum(sum_R, np.float32(-MAX_ABSENCE_PENALTY))
        return result


def count_buckets(buckets: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Number of occurrences of each bucket."""
    return np.bincount(buckets, minlength=NUM_BUCKETS).astype(np.float32)


MATURE = 32
"""Records after which a regime's profile is reliable enough to claim records from another."""
NUM_SAMPLED = 32
"""Records kept token by token, exemplars of how well the regime explains its own. With the recent ones they are about
64, which `mixture` needs to tell 20 tasks apart; with more, it would also divide single tasks by their topics."""
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


class SampledRecord(NamedTuple):
    """What is kept of a sampled record."""

    buckets: NDArray[np.uint16]
    x_D: NDArray[np.float32]
    log_length: float
    ordinal: int


@dataclass(frozen=True, eq=False)
class RegimeProfile:
    """One regime: its token counts, its reference distribution, and when it occurred.

    A value: updates return a new profile, so a saved state shares the profiles that have not changed since.
    """

    number: int
    first_record: int
    counts_B: NDArray[np.float32] = field(default_factory=lambda: np.zeros(NUM_BUCKETS, dtype=np.float32))
    reference: ReferenceDistribution = field(default_factory=ReferenceDistribution)
    token_frequency: DocumentFrequency = field(default_factory=DocumentFrequency)
    sample: tuple[SampledRecord, ...] = ()
    """A uniform sample of the records committed to the profile."""
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
    was_split: bool = False
    """Whether this regime came out of the split of a mixture."""
    next_test: int = MIN_TESTED
    """Number of records at which it is tested next for being a mixture."""

    def with_record(self, record: Features, ordinal: int) -> "RegimeProfile":
        """Count the record's tokens and length."""
        profile = self._counted(record.buckets, record.log_length)
        profile = replace(profile, last_record=max(self.last_record, ordinal))
        if profile.tokens > MAX_TOKENS:
            profile = replace(profile, counts_B=profile.counts_B / np.float32(2), tokens=profile.tokens / 2)
        return profile

    def without_record(self, record: Features) -> "RegimeProfile":
        """Undo `with_record`, for a record that turns out to belong to another regime."""
        counts_B = self.counts_B - count_buckets(record.buckets)
        counts_B = np.maximum(counts_B, np.float32(0.0))  # below 0 only if the counts were halved in between
        profile = replace(self, counts_B=counts_B, token_frequency=self.token_frequency.without(record.buckets))
        return profile._with_scalars(record.buckets, record.log_length, -1)

    def committed(self, record: Features, ordinal: int, metric: Metric) -> "RegimeProfile":
        """Add the record to the reference distribution for good, and maybe to the sample, which stays uniform."""
        place, kept = len(self.sample), list(self.sample)
        if place == NUM_SAMPLED:
            place = ((self.number << 32) + self.records) * _MIX % (1 << 64) * max(self.records, 1) >> 64
        if place < NUM_SAMPLED:
            kept[place : place + 1] = [SampledRecord(record.buckets, record.x_D, record.log_length, ordinal)]
        return replace(self, reference=self.reference.after(record.x_D, metric), sample=tuple(kept))

    @property
    def exemplars(self) -> tuple[NDArray[np.uint16], ...]:
        """The tokens of the sample, which measure how well the regime explains its own records."""
        return tuple(record.buckets for record in self.sample)

    @property
    def is_mature(self) -> bool:
        """Whether the profile is reliable enough to claim records from another regime."""
        return self.was_split or self.records >= MATURE

    def restarted(self, sample: Sequence[SampledRecord], ordinal: int) -> "RegimeProfile":
        """Forget all records but some of the sample, after a split: the others may be the other regime's."""
        profile = RegimeProfile(
            self.number,
            self.first_record,
            sample=tuple(sample),
            visits=self.visits,
            last_record=ordinal,
            fit_center=self.fit_center,
            fit_scale=self.fit_scale,
            fit_tail=self.fit_tail,
            was_split=True,
        )
        for record in sample:
            profile = profile._counted(record.buckets, record.log_length)
        return profile

    def fit(self, log_ratio: float, record: Features) -> float:
        """Deviations by which a record's log ratio per bucket exceeds that of the regime's own records."""
        return (log_ratio / len(record.buckets) - self.fit_center) / self.fit_scale

    def tail_fit(self, log_ratio: float, record: Features) -> float:
        """The same in deviations of the lower tail, to judge one record by itself."""
        return (log_ratio / len(record.buckets) - self.fit_center) / self.fit_tail

    def calibrated(self, exemplar_fits: NDArray[np.float64]) -> "RegimeProfile":
        """Set the fit: median, robust deviation and lower tail of the exemplars' log ratios per bucket."""
        center = float(np.median(exemplar_fits))
        robust = 1.4826 * float(np.median(np.abs(exemplar_fits - center)))
        tail = (center - float(np.quantile(exemplar_fits, LOW))) / LOW_DEVIATIONS
        scale = _with_prior(robust, len(exemplar_fits))
        fit_tail = max(scale, _with_prior(tail, len(exemplar_fits)))
        return replace(self, fit_center=center, fit_scale=scale, fit_tail=fit_tail)

    @property
    def length_mean(self) -> float:
        """Mean of the logarithm of the length."""
        return self.length_sum / max(self.records, 1)

    @property
    def length_deviation(self) -> float:
        """The sigma of eq. (4): of the logarithm of the length, with a prior of two records at a deviation of 0.5."""
        mean = self.length_sum / max(self.records, 1.0)
        squares = max(self.length_squares - self.records * mean**2, 0.0)
        return float(max(((squares + 2 * 0.25) / (self.records + 2)) ** 0.5, _MIN_DEVIATION))

    def merged(self, other: "RegimeProfile") -> "RegimeProfile":
        """Add the records of another regime; number, first record and fit stay."""
        sums = ("counts_B", "visits", "records", "tokens", "length_sum", "length_squares")
        return replace(
            self,
            last_record=max(self.last_record, other.last_record),
            reference=self.reference.merged(other.reference),
            token_frequency=self.token_frequency.merged(other.token_frequency),
            sample=(*self.sample, *other.sample)[:NUM_SAMPLED],
            **{name: getattr(self, name) + getattr(other, name) for name in sums},
        )

    def _counted(self, buckets: NDArray[np.uint16], log_length: float) -> "RegimeProfile":
        counts_B = self.counts_B + count_buckets(buckets)
        profile = replace(self, counts_B=counts_B, token_frequency=self.token_frequency.after(buckets))
        return profile._with_scalars(buckets, log_length, 1)

    def _with_scalars(self, buckets: NDArray[np.uint16], log_length: float, sign: int) -> "RegimeProfile":
        return replace(
            self,
            tokens=self.tokens + sign * len(buckets),
            records=self.records + sign,
            length_sum=self.length_sum + sign * log_length,
            length_squares=self.length_squares + sign * log_length**2,
        )


def _with_prior(deviation: float, number: int) -> float:
    """A deviation of `number` exemplars' fits, weighted with the prior one."""
    return float(((number * deviation**2 + FIT_PRIOR * FIT_DEVIATION**2) / (number + FIT_PRIOR)) ** 0.5)


CALIBRATED_AT = frozenset(1 << power for power in range(2, 20))
"""Numbers of committed records at which a regime's fit is calibrated, in addition to every shift."""
INDISTINGUISHABLE = 1.5
"""Two profiles are one regime's if their statistic is below: 1 is expected then, and 2 separates real tasks."""

Excluded = Mapping[int, NDArray[np.float32]]
"""Token counts by slot that are subtracted before scoring."""


class RegimeScores(NamedTuple):
    """A record's scores under the regime of every slot, in nats; -inf for a vacant slot."""

    log_ratios_R: NDArray[np.float32]
    """Eq. (3): tokens only."""
    scores_R: NDArray[np.float32]
    """Eq. (4): tokens and length. The largest belongs to the likeliest regime."""


Profiles = tuple[RegimeProfile | None, ...]
"""The memory's content by slot; None for a vacant slot."""


class RegimeMemory:
    """Profiles by slot; the lowest free slot is taken first."""

    def __init__(
        self, max_regimes: int, profiles: Profiles = (), next_number: int = 1, metric: Metric = IDENTITY
    ) -> None:
        self._max_regimes = max_regimes
        self.metric = metric
        """The W of `reference`, eq. (1), as of the last `whiten`."""
        self._counts_RB = np.zeros((max_regimes, NUM_BUCKETS), dtype=np.float32)
        self._columns = np.zeros((3, max_regimes), dtype=np.float32)  # tokens, length mean, length deviation
        self._profiles: list[RegimeProfile | None] = []
        self._vacant: list[int] = []
        """Slots below the length that have no profile, in order."""
        self.next_number = next_number
        for slot, profile in enumerate(profiles):
            self._profiles.append(None)
            if profile is None:
                self.forget(slot)
            else:
                self._put(slot, profile)

    @property
    def profiles(self) -> Profiles:
        """The content; profiles are never written to."""
        return tuple(self._profiles)

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

    def reference(self, slot: int) -> Reference:
        """The distribution of a regime's records."""
        return Reference(self[slot].reference, self.metric)

    def whiten(self) -> None:
        """Take the metric from what is remembered now."""
        self.metric = pooled_metric([self[slot].reference for slot in self.occupied])

    def log_ratios(self, buckets: NDArray[np.uint16], excluded: Excluded | None = None) -> NDArray[np.float32]:
        """Eq. (3) under every regime."""
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

    def score(self, record: Features, excluded: Excluded | None = None) -> RegimeScores:
        """Score a record under every regime."""
        _, mean_R, deviation_R = self._columns[:, : len(self)]
        log_ratios_R = self.log_ratios(record.buckets, excluded)
        return RegimeScores(log_ratios_R, log_ratios_R + length_scores(record, mean_R, deviation_R))

    def rank(self, records: Iterable[Features]) -> list[int]:
        """Slots of all regimes, the one that explains the records best by eq. (4) first."""
        total_R = np.sum([self.score(record).scores_R for record in records], axis=0)
        return [int(slot) for slot in np.argsort(-total_R, kind="stable") if slot not in self._vacant]

    def calibrate(self, slots: Iterable[int] | None = None) -> None:
        """Measure how well the regimes, by default all, explain their own exemplars."""
        for slot in self.occupied if slots is None else slots:
            if exemplars := self[slot].exemplars:
                self._profiles[slot] = self[slot].calibrated(self.exemplar_fits(slot, exemplars))

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
        self._put(slot, self[slot].with_record(record, ordinal))

    def move(self, record: RecentRecord, new: int) -> None:
        """Move a record from its slot to another."""
        if record.slot != new:
            self._put(record.slot, self[record.slot].without_record(record.features))
            self.add(new, record.features, record.ordinal)

    def commit(self, record: RecentRecord) -> None:
        """Commit a record to the profile in its slot."""
        profile = self[record.slot].committed(record.features, record.ordinal, self.metric)
        self._profiles[record.slot] = profile
        if profile.reference.num_records in CALIBRATED_AT:
            self.calibrate([record.slot])

    def change(self, slot: int, **values: Any) -> None:
        """Set fields of a profile that are not used for scoring."""
        self._profiles[slot] = replace(self[slot], **values)

    def postpone_test(self, slot: int) -> None:
        """Test for a mixture again after half as many records more, within the bounds of the interval."""
        records = self[slot].records
        self.change(slot, next_test=records + min(max(records // 2, MIN_TEST_INTERVAL), MAX_TEST_INTERVAL))

    def divide(self, slot: int, new: int, moved: Collection[int], ordinal: int) -> None:
        """Divide the sample of a regime between it and the one in `new`; both restart with their part.

        Their recent records must be added again.

        Args:
            slot: The regime's slot.
            new: The slot of a new regime.
            moved: Ordinals of the records that move to the new regime.
            ordinal: Ordinal of the newest record.
        """
        sample = self[slot].sample
        for part, is_new in ((slot, False), (new, True)):
            own = [record for record in sample if (record.ordinal in moved) == is_new]
            self._put(part, self[part].restarted(own, ordinal))

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
        else:
            freed = self._make_room(ordinal, protected)
            if freed is None:
                return None
            slot, dropped = freed, self[freed].number
        self._put(slot, RegimeProfile(self.next_number, ordinal))
        self.next_number += 1
        return slot, dropped

    def forget(self, slot: int) -> None:
        """Leave the slot vacant. No segment may have its records."""
        self._profiles[slot] = None
        self._vacant = sorted([*self._vacant, slot])
        self._counts_RB[slot] = 0.0
        self._columns[:, slot] = 0.0, 0.0, 1.0  # any deviation above 0: the score is -inf

    def _make_room(self, ordinal: int, protected: Collection[int]) -> int | None:
        """Merge or drop a regime and return its slot."""
        candidates = [slot for slot in self.occupied if slot not in protected]
        if not candidates:
            return None
        if pair := self._indistinguishable_pair(candidates):
            kept, merged = pair
            self._put(kept, self[kept].merged(self[merged]))
            return merged
        # Eq. (1).
        return min(candidates, key=lambda slot: self[slot].records / (1 + ordinal - self[slot].last_record))

    def _indistinguishable_pair(self, candidates: list[int]) -> tuple[int, int] | None:
        """The two closest slots, the older regime first, if the change test takes them for one regime."""
        best: tuple[float, int, int] = (INDISTINGUISHABLE, -1, -1)
        for i, one in enumerate(candidates):
            for other in candidates[i + 1 :]:
                a, b = self.reference(one), self[other].reference
                if min(a.num_records, b.num_records) < 2:
                    continue
                best = min(best, (a.statistic(b.mean, int(b.num_records)), one, other))
        if best[1] < 0:
            return None
        one, other = sorted(best[1:], key=lambda slot: self[slot].number)
        return one, other

    def _put(self, slot: int, profile: RegimeProfile) -> None:
        self._profiles[slot] = profile
        self._counts_RB[slot] = profile.counts_B
        self._columns[:, slot] = profile.tokens, profile.length_mean, profile.length_deviation
