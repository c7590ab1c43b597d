"""Whether a word that the stretch hardly ever had is now in most of its records, or the other way round.

    P(j of n | k of N) = C(n, j) B(k + j + 1/2, N - k + n - j + 1/2) / B(k + 1/2, N - k + 1/2)              (1)

k of the stretch's N records before the window have the word, j of the n in it: eq. (1) is the beta-binomial chance of
that while the word's share stays what it was (Jeffreys prior). Alarm when -log P of one word passes that of the level,
shared among all words, `CAUTION` times: neighbours that share a topic share words too. Regimes that differ in a single
word ("is there a", "is there not a") hardly differ in their mean embeddings or in how well their words fit; only this
test tells them apart.

    >>> from streamlearn.shift.document_frequency import window_counts
    >>> rng = np.random.default_rng(0)
    >>> words = [rng.integers(0, 99, size=12) for _ in range(200)]
    >>> words[150:] = [np.append(each, 99) if i % 5 else each for i, each in enumerate(words[150:])]    # planted
    >>> test, shares = TokenPresenceTest(level=1e-8), DocumentFrequency()
    >>> for each in words[:118]:
    ...     shares = shares.after(each)
    >>> next(t for t in range(150, 200) if test.test(window_counts(words[t - 32 : t]), 32, shares)) - 150
    27
"""
# Shape suffixes: B buckets, W candidates.

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln, gammaln

from streamlearn.shift.document_frequency import COMMON, DocumentFrequency
from streamlearn.shift.featurizer import NUM_BUCKETS

WINDOW = 32
MIN_SHARES = 64
"""Records of the stretch before the window."""
RARE = 0.05
"""A word comes when at most so many of the records before had it and at least `COMMON` of the newest do, or goes."""
CAUTION = 1.5
"""Bursts of records of like length reach 1.1 (SuperNI's 15 tasks, level 1e-8)."""


@dataclass(frozen=True)
class TokenChange:
    """A word that came or went."""

    word: int
    came: bool
    statistic: float
    """-log P of eq. (1), nats."""
    threshold: float


@dataclass(frozen=True)
class TokenPresenceTest:
    """The test; it holds no state."""

    level: float
    """Probability of an alarm in one test of independent records while nothing changes."""

    def test(self, window_B: NDArray[np.float32], n: int, shares: DocumentFrequency) -> TokenChange | None:
        """Test a window of n records, of which `window_B` have each word, against the stretch before it."""
        if n < WINDOW or shares.number < MIN_SHARES:
            return None
        k_B, before = shares.records_B, shares.number
        came_B = (window_B >= COMMON * n) & (k_B <= RARE * before)
        went_B = (window_B <= RARE * n) & (k_B >= COMMON * before)
        found_W = np.flatnonzero(came_B | went_B)
        if not len(found_W):
            return None
        j_W, k_W = window_B[found_W].astype(np.float64), k_B[found_W].astype(np.float64)
        ways_W = gammaln(n + 1) - gammaln(j_W + 1) - gammaln(n - j_W + 1)
        chance_W = (
            ways_W + betaln(k_W + j_W + 0.5, before - k_W + n - j_W + 0.5) - betaln(k_W + 0.5, before - k_W + 0.5)
        )
        least = int(chance_W.argmin())
        statistic, threshold = -float(chance_W[least]), CAUTION * math.log(NUM_BUCKETS / self.level)
        word = int(found_W[least])
        return TokenChange(word, bool(came_B[word]), statistic, threshold) if statistic > threshold else None


def change_point(records: Sequence[NDArray[np.uint16]], turn: TokenChange) -> int:
    """Where in the window the word came or went: the split with the most records that agree behind it, less others."""
    agrees = np.array([(turn.word in buckets) == turn.came for buckets in records])
    return int(np.cumsum((agrees - 0.5)[::-1])[::-1].argmax())
