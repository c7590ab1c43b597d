"""Durations as a histogram."""

from bisect import bisect_left
from dataclasses import dataclass

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Inclusive upper bounds of the buckets, seconds."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one operation since the process started, as a histogram over `BUCKETS_S`.

    >>> timing = Timing().observe(0.02).observe(0.3)
    >>> timing.count, timing.total_s, timing.last_s
    (2, 0.32, 0.3)
    """

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    """Observations per bucket, not cumulative; the last bucket has no upper bound."""
    total_s: float = 0.0
    """Sum of all durations."""
    last_s: float | None = None
    """The last duration; None before the first."""

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, seconds: float) -> "Timing":
        """Return this timing with one more observation."""
        bucket = bisect_left(BUCKETS_S, seconds)
        counts = (*self.counts[:bucket], self.counts[bucket] + 1, *self.counts[bucket + 1 :])
        return Timing(counts, self.total_s + seconds, seconds)
