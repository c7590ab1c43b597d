"""What is remembered of one regime: bounded in size and cheap to copy."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.document_frequency import DocumentFrequency
from streamlearn.shift.featurizer import NUM_BUCKETS, Features
from streamlearn.shift.mixture_test import MIN_TESTED
from streamlearn.shift.naive_bayes import count_buckets, length_deviation
from streamlearn.shift.reference_distribution import ReferenceDistribution

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
