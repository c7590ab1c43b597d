"""Change of one token's frequency: a rare token is now in most records, or a common one in hardly any.

    P(j of n | k of N) = C(n, j) B(k + j + 1/2, N - k + n - j + 1/2) / B(k + 1/2, N - k + 1/2)              (1)

k of the segment's N records before the window have the token, and j of the n records in it. Eq. (1) is the
beta-binomial probability of that under an unchanged frequency (Jeffreys prior). Alarm when -log P of one token exceeds
that of the level, divided among all tokens, by the factor `CAUTION`: consecutive records on one topic share tokens.
Regimes that differ in a single token ("is there a", "is there not a") hardly differ in their mean embeddings or in the
fit of their records; only this test separates them.

    >>> from streamlearn.shift.document_frequency import count_records
    >>> rng = np.random.default_rng(0)
    >>> records = [rng.integers(0, 99, size=12) for _ in range(200)]
    >>> records[150:] = [np.append(each, 99) if i % 5 else each for i, each in enumerate(records[150:])]    # planted
    >>> test, before = TokenPresenceTest(level=1e-8), DocumentFrequency()
    >>> for each in records[:118]:
    ...     before = before.after(each)
    >>> next(t for t in range(150, 200) if test.test(count_records(records[t - 32 : t]), 32, before)) - 150
    27
"""
# Shape suffixes: B buckets, C candidates.

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln, gammaln

from streamlearn.shift.document_frequency import COMMON, DocumentFrequency
from streamlearn.shift.featurizer import NUM_BUCKETS

WINDOW = 32
MIN_BEFORE = 64
"""Records of the segment before the window without which nothing is tested."""
RARE = 0.05
"""A token is rare where at most this share of the records have it. Only changes between rare and common are tested."""
CAUTION = 1.5
"""Bursts of records of similar length reach 1.1 (SuperNI's 15 tasks, level 1e-8)."""


@dataclass(frozen=True)
class TokenChange:
    """A token that appeared or disappeared."""

    bucket: int
    appeared: bool
    statistic: float
    """-log P of eq. (1), nats."""
    threshold: float


@dataclass(frozen=True)
class TokenPresenceTest:
    """The stateless test."""

    level: float
    """Probability of an alarm in one test of independent records under no change."""

    def test(self, window_B: NDArray[np.float32], n: int, before: DocumentFrequency) -> TokenChange | None:
        """Test a window of n records, `window_B` of which have each token, against the segment before it."""
        if n < WINDOW or before.num_records < MIN_BEFORE:
            return None
        k_B, total = before.records_B, before.num_records
        appeared_B = (window_B >= COMMON * n) & (k_B <= RARE * total)
        disappeared_B = (window_B <= RARE * n) & (k_B >= COMMON * total)
        bucket_C = np.flatnonzero(appeared_B | disappeared_B)
        if not len(bucket_C):
            return None
        j_C, k_C = window_B[bucket_C].astype(np.float64), k_B[bucket_C].astype(np.float64)
        ways_C = gammaln(n + 1) - gammaln(j_C + 1) - gammaln(n - j_C + 1)
        log_p_C = ways_C + betaln(k_C + j_C + 0.5, total - k_C + n - j_C + 0.5) - betaln(k_C + 0.5, total - k_C + 0.5)
        least = int(log_p_C.argmin())
        statistic, threshold = -float(log_p_C[least]), CAUTION * math.log(NUM_BUCKETS / self.level)
        bucket = int(bucket_C[least])
        return TokenChange(bucket, bool(appeared_B[bucket]), statistic, threshold) if statistic > threshold else None

    @staticmethod
    def change_point(records: Sequence[NDArray[np.uint16]], change: TokenChange) -> int:
        """Index of the record at which the token appeared or disappeared.

        The split after which most records agree with the change, less those that do not.
        """
        agrees = np.array([(change.bucket in buckets) == change.appeared for buckets in records])
        return int(np.cumsum((agrees - 0.5)[::-1])[::-1].argmax())
