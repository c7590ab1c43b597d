"""What is remembered of one regime: bounded, and copied cheaply."""

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift import naive_bayes as words
from streamlearn.shift.document_frequency import DocumentFrequency
from streamlearn.shift.featurizer import NUM_BUCKETS, Features
from streamlearn.shift.reference_distribution import ReferenceDistribution

NUM_EXEMPLARS = 16
"""Records kept word by word, to ask how well the regime explains its own."""
FIT_PRIOR = 2.0
"""Exemplars' worth of belief in FIT_DEVIATION."""
FIT_DEVIATION = 0.1
"""Standard deviation of a record's log ratio per bucket, nats, before any was seen."""
MAX_TOKENS = float(1 << 21)
"""Counts are halved at so many: below 2^24 they are exact in float32, and old words fade."""
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
    """One regime: its words, its reference for the change test, and when it was met."""

    number: int
    first_record: int
    counts_B: NDArray[np.float32] = field(default_factory=lambda: np.zeros(NUM_BUCKETS, dtype=np.float32))
    reference: ReferenceDistribution = field(default_factory=ReferenceDistribution)
    shares: DocumentFrequency = field(default_factory=DocumentFrequency)
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
        """An independent one with the same content."""
        return replace(self, counts_B=self.counts_B.copy(), reference=self.reference.copy())

    def add(self, record: Features, ordinal: int) -> None:
        """Count the record's words."""
        self._count(record, 1.0)
        self.last_record = max(self.last_record, ordinal)
        if self.tokens > MAX_TOKENS:
            self.counts_B /= 2
            self.tokens /= 2

    def remove(self, record: Features) -> None:
        """Take back `add`, when the record turns out to belong elsewhere."""
        self._count(record, -1.0)
        np.maximum(self.counts_B, 0.0, out=self.counts_B)  # only where a halving came between

    def keep(self, record: Features) -> None:
        """Perhaps make the record an exemplar: each that was offered stays with the same probability."""
        place = len(self.exemplars)
        if len(self.exemplars) == NUM_EXEMPLARS:
            place = ((self.number << 32) + self.records) * _MIX % (1 << 64) * max(self.records, 1) >> 64
        if place < NUM_EXEMPLARS:
            kept = list(self.exemplars)
            kept[place : place + 1] = [record.buckets]
            self.exemplars = tuple(kept)

    def fit(self, log_ratio: float, record: Features) -> float:
        """How many deviations a record's log ratio per bucket lies above that of the regime's own records."""
        return (log_ratio / len(record.buckets) - self.fit_center) / self.fit_scale

    def calibrate(self, running: NDArray[np.float64]) -> None:
        """Learn what is usual for this regime: median and spread of its exemplars' log ratios per bucket."""
        self.fit_center = float(np.median(running))
        deviation = 1.4826 * float(np.median(np.abs(running - self.fit_center)))
        squares = len(running) * deviation**2 + FIT_PRIOR * FIT_DEVIATION**2
        self.fit_scale = float((squares / (len(running) + FIT_PRIOR)) ** 0.5)

    @property
    def length_mean(self) -> float:
        """Mean of the logarithm of the length."""
        return self.length_sum / max(self.records, 1)

    @property
    def length_deviation(self) -> float:
        """Its standard deviation."""
        return words.length_deviation(self.length_sum, self.length_squares, self.records)

    def _count(self, record: Features, sign: float) -> None:
        if sign > 0:
            self.counts_B += words.count(record.buckets)
            self.shares = self.shares.after(record.buckets)
        else:
            self.counts_B -= words.count(record.buckets)
            self.shares = self.shares.without(record.buckets)
        self.tokens += sign * len(record.buckets)
        self.records += int(sign)
        self.length_sum += sign * record.log_length
        self.length_squares += sign * record.log_length**2
