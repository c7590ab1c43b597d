"""What is remembered of one regime: bounded in size and cheap to copy."""

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.document_frequency import DocumentFrequency
from streamlearn.shift.featurizer import NUM_BUCKETS, Features
from streamlearn.shift.naive_bayes import count_buckets, length_deviation
from streamlearn.shift.reference_distribution import ReferenceDistribution

MATURE = 32
"""Records after which a regime's profile is reliable enough to claim records from another."""
NUM_EXEMPLARS = 16
"""Records kept token by token, to measure how well the regime explains its own records."""
FIT_PRIOR = 2.0
"""Weight of FIT_DEVIATION, in exemplars."""
FIT_DEVIATION = 0.1
"""Prior standard deviation of a record's log ratio per bucket, nats."""
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


@dataclass(eq=False)
class RegimeProfile:
    """One regime: its token counts, its reference distribution, and when it occurred."""

    number: int
    first_record: int
    counts_B: NDArray[np.float32] = field(default_factory=lambda: np.zeros(NUM_BUCKETS, dtype=np.float32))
    reference: ReferenceDistribution = field(default_factory=ReferenceDistribution)
    token_frequency: DocumentFrequency = field(default_factory=DocumentFrequency)
    exemplars: tuple[NDArray[np.uint16], ...] = ()
    visits: int = 1
    records: int = 0
    last_record: int = 0
    tokens: float = 0.0
    length_sum: float = 0.0
    length_squares: float = 0.0
    fit_center: float = 0.0
    fit_scale: float = 1.0

    def copy(self) -> Self:
        """An independent copy."""
        return replace(self, counts_B=self.counts_B.copy(), reference=self.reference.copy())

    def add(self, record: Features, ordinal: int) -> None:
        """Count the record's tokens and length."""
        self.counts_B += count_buckets(record.buckets)
        self.token_frequency = self.token_frequency.after(record.buckets)
        self._add_scalars(record, 1)
        self.last_record = max(self.last_record, ordinal)
        if self.tokens > MAX_TOKENS:
            self.counts_B /= 2
            self.tokens /= 2

    def remove(self, record: Features) -> None:
        """Undo `add`, for a record that turns out to belong to another regime."""
        self.counts_B -= count_buckets(record.buckets)
        self.token_frequency = self.token_frequency.without(record.buckets)
        self._add_scalars(record, -1)
        np.maximum(self.counts_B, 0.0, out=self.counts_B)  # below 0 only if the counts were halved in between

    def offer_exemplar(self, record: Features) -> None:
        """Make the record an exemplar with some probability, so that the exemplars are a uniform sample."""
        place = len(self.exemplars)
        if len(self.exemplars) == NUM_EXEMPLARS:
            place = ((self.number << 32) + self.records) * _MIX % (1 << 64) * max(self.records, 1) >> 64
        if place < NUM_EXEMPLARS:
            kept = list(self.exemplars)
            kept[place : place + 1] = [record.buckets]
            self.exemplars = tuple(kept)

    def fit(self, log_ratio: float, record: Features) -> float:
        """Deviations by which a record's log ratio per bucket exceeds that of the regime's own records."""
        return (log_ratio / len(record.buckets) - self.fit_center) / self.fit_scale

    def calibrate(self, exemplar_fits: NDArray[np.float64]) -> None:
        """Set the usual fit: median and robust deviation of the exemplars' log ratios per bucket."""
        self.fit_center = float(np.median(exemplar_fits))
        deviation = 1.4826 * float(np.median(np.abs(exemplar_fits - self.fit_center)))
        squares = len(exemplar_fits) * deviation**2 + FIT_PRIOR * FIT_DEVIATION**2
        self.fit_scale = float((squares / (len(exemplar_fits) + FIT_PRIOR)) ** 0.5)

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
        self.exemplars = (*self.exemplars, *other.exemplars)[:NUM_EXEMPLARS]

    def _add_scalars(self, record: Features, number: int) -> None:
        self.tokens += number * len(record.buckets)
        self.records += number
        self.length_sum += number * record.log_length
        self.length_squares += number * record.log_length**2
