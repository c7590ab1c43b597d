"""How many of a number of records have each word, however often."""
# Shape suffixes: B buckets.

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.featurizer import NUM_BUCKETS

COMMON = 0.6
"""A word that at least this share of the records have is one that they usually have."""
MEMORY = 4096.0
"""Records after which the past counts half."""


@dataclass(frozen=True, eq=False)
class DocumentFrequency:
    """Of `number` records, `records_B` have each word."""

    records_B: NDArray[np.float32] = field(default_factory=lambda: np.zeros(NUM_BUCKETS, dtype=np.float32))
    number: float = 0.0

    def after(self, buckets: NDArray[np.uint16]) -> "DocumentFrequency":
        """With one record more."""
        keep = 0.5 if self.number >= MEMORY else 1.0
        records_B = self.records_B.copy() if keep == 1.0 else self.records_B * np.float32(keep)
        count(records_B, buckets)
        return DocumentFrequency(records_B, self.number * keep + 1.0)

    def without(self, buckets: NDArray[np.uint16]) -> "DocumentFrequency":
        """With one record less, which was counted before."""
        records_B = self.records_B.copy()
        count(records_B, buckets, by=-1.0)
        np.maximum(records_B, 0.0, out=records_B)  # only where the past was halved between
        return DocumentFrequency(records_B, max(self.number - 1.0, 0.0))

    def joined(self, other: "DocumentFrequency") -> "DocumentFrequency":
        """With all that the other has counted."""
        return DocumentFrequency(self.records_B + other.records_B, self.number + other.number)

    @property
    def expected(self) -> NDArray[np.float32]:
        """Each word's share in records to come (Jeffreys prior): never 0 nor 1."""
        shares_B: NDArray[np.float32] = (self.records_B + np.float32(0.5)) / np.float32(self.number + 1.0)
        return shares_B


def window_counts(records: Iterable[NDArray[np.uint16]]) -> NDArray[np.float32]:
    """How many of the records have each word."""
    counts_B = np.zeros(NUM_BUCKETS, dtype=np.float32)
    for buckets in records:
        count(counts_B, buckets)
    return counts_B


def count(records_B: NDArray[np.float32], buckets: NDArray[np.uint16], by: float = 1.0) -> None:
    """One record more (or fewer) that has these words; in place."""
    records_B[buckets] += np.float32(by)  # a word that stands there twice is written twice and counts once
