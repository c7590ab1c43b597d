"""What is remembered of one regime: bounded, and copied cheaply."""

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift import words
from streamlearn.shift.reference import Reference
from streamlearn.shift.signature import NUM_BUCKETS, Signature

FIT_PRIOR = 4.0
"""Records' worth of belief in FIT_DEVIATION."""
FIT_DEVIATION = 0.3
"""Standard deviation of a record's mean score per token, in nats, before any was seen."""
MAX_TOKENS = float(1 << 21)
"""Counts are halved at so many: below 2^24 they are exact in float32, and old words fade."""

SCALARS = (
    "number",
    "visits",
    "records",
    "first_record",
    "last_record",
    "tokens",
    "length_sum",
    "length_squares",
    "fit_sum",
    "fit_squares",
    "fit_number",
)
"""Fields that a snapshot keeps as one row of float64, exact for integers below 2^53."""


@dataclass(eq=False)
class Sketch:
    """One regime: its word counts, its reference for the change test, and when it was met."""

    number: int
    first_record: int
    counts_B: NDArray[np.float32] = field(default_factory=lambda: np.zeros(NUM_BUCKETS, dtype=np.float32))
    reference: Reference = field(default_factory=Reference)
    visits: int = 1
    records: int = 0
    last_record: int = 0
    tokens: float = 0.0
    length_sum: float = 0.0
    length_squares: float = 0.0
    fit_sum: float = 0.0
    fit_squares: float = 0.0
    fit_number: float = 0.0

    def copy(self) -> Self:
        """An independent one with the same content."""
        return replace(self, counts_B=self.counts_B.copy(), reference=self.reference.copy())

    def add(self, record: Signature, ordinal: int) -> None:
        """Count the record's words."""
        self._count(record, 1.0)
        self.last_record = max(self.last_record, ordinal)
        if self.tokens > MAX_TOKENS:
            self.counts_B /= 2
            self.tokens /= 2

    def remove(self, record: Signature) -> None:
        """Take back `add`, when the record turns out to belong elsewhere."""
        self._count(record, -1.0)
        np.maximum(self.counts_B, 0.0, out=self.counts_B)  # only where a halving came between

    def fit(self, score: float, record: Signature) -> float:
        """How many deviations a record's score per token lies above this regime's own mean."""
        mean = self.fit_sum / max(self.fit_number, 1.0)
        return (score / len(record.buckets) - mean) / self._fit_deviation(mean)

    def learn_fit(self, score: float, record: Signature) -> None:
        """Remember how well a record of this regime fitted before it was counted."""
        each = score / len(record.buckets)
        if self.fit_number >= 512:  # what fitted badly when little was known does not count for ever
            self.fit_sum, self.fit_squares, self.fit_number = self.fit_sum / 2, self.fit_squares / 2, 256.0
        self.fit_sum += each
        self.fit_squares += each**2
        self.fit_number += 1.0

    def _fit_deviation(self, mean: float) -> float:
        squares = max(self.fit_squares - self.fit_number * mean**2, 0.0) + FIT_PRIOR * FIT_DEVIATION**2
        return float((squares / (self.fit_number + FIT_PRIOR)) ** 0.5)

    @property
    def length_mean(self) -> float:
        """Mean of the logarithm of the length."""
        return self.length_sum / max(self.records, 1)

    @property
    def length_deviation(self) -> float:
        """Its standard deviation."""
        return words.length_deviation(self.length_sum, self.length_squares, self.records)

    def _count(self, record: Signature, sign: float) -> None:
        if sign > 0:
            self.counts_B += words.count(record)
        else:
            self.counts_B -= words.count(record)
        self.tokens += sign * len(record.buckets)
        self.records += int(sign)
        self.length_sum += sign * record.log_length
        self.length_squares += sign * record.log_length**2
