"""Document frequency: how many records have each token, however often it occurs in them."""
# Shape suffixes: B buckets.

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.featurizer import NUM_BUCKETS

COMMON = 0.6
"""A token is common where at least this share of the records have it."""
HALVED_AT = 4096.0
"""Records at which the counts are halved, so that old records fade."""


@dataclass(frozen=True, eq=False)
class DocumentFrequency:
    """Number of records with each token, out of `num_records`. A value: updates return a new one."""

    records_B: NDArray[np.float32] = field(default_factory=lambda: np.zeros(NUM_BUCKETS, dtype=np.float32))
    num_records: float = 0.0

    def after(self, buckets: NDArray[np.uint16]) -> "DocumentFrequency":
        """Return the counts with one more record."""
        keep = 0.5 if self.num_records >= HALVED_AT else 1.0
        records_B = self.records_B.copy() if keep == 1.0 else self.records_B * np.float32(keep)
        add_record(records_B, buckets)
        return DocumentFrequency(records_B, self.num_records * keep + 1.0)

    def without(self, buckets: NDArray[np.uint16]) -> "DocumentFrequency":
        """Return the counts without one record that was counted before."""
        records_B = self.records_B.copy()
        remove_record(records_B, buckets)
        num_records = max(self.num_records - 1.0, 0.0)
        # Outside of this range only if the counts were halved in between.
        return DocumentFrequency(np.clip(records_B, 0.0, num_records, dtype=np.float32), num_records)

    def merged(self, other: "DocumentFrequency") -> "DocumentFrequency":
        """Return the sum of both counts."""
        return DocumentFrequency(self.records_B + other.records_B, self.num_records + other.num_records)

    @property
    def expected(self) -> NDArray[np.float32]:
        """Expected share of future records with each token (Jeffreys prior): never 0 or 1."""
        expected_B: NDArray[np.float32] = (self.records_B + np.float32(0.5)) / np.float32(self.num_records + 1.0)
        return expected_B


def count_records(records: Iterable[NDArray[np.uint16]]) -> NDArray[np.float32]:
    """Number of the records with each token."""
    counts_B = np.zeros(NUM_BUCKETS, dtype=np.float32)
    for buckets in records:
        add_record(counts_B, buckets)
    return counts_B


def add_record(records_B: NDArray[np.float32], buckets: NDArray[np.uint16]) -> None:
    """Count one more record with these tokens, in place."""
    records_B[buckets] += np.float32(1.0)  # a repeated index is written repeatedly and counts once


def remove_record(records_B: NDArray[np.float32], buckets: NDArray[np.uint16]) -> None:
    """Count one record fewer with these tokens, in place."""
    records_B[buckets] -= np.float32(1.0)
