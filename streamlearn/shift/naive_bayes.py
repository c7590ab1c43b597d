"""Naive Bayes over hashed tokens: which regime a single record belongs to.

    p_b = (sum over regimes of c_rb / c_r, + 1 / B) / (R + 1)                                               (1)
    w_r = sum_(b in record) log((c_rb + a p_b) / (c_r + a)) - log p_b                                       (2)
    score_r = w_r + log N(log length; mu_r, sigma_r)                                                        (3)
    m_r = max(sum_(b in C, not in record) log(1 - s_rb), -8)                                                (4)

c_rb counts bucket b in regime r. Counts are smoothed with a = 1000 tokens of the background p, so a token that a regime
happens not to have had yet does not decide. The uniform part of p makes eq. (2) informative while there is only one
regime. w_r per bucket is how much better regime r explains a record than the background does: the topic of the record
cancels, and apart from a little noise the value is the same for all records of a regime (`RegimeProfile.fit`).

Absent tokens separate "is there a" from "is there not a": s_rb is the share of regime r's records that have bucket b,
and C holds the buckets that most records of some regime have (`COMMON`). A record classified by itself goes to the
regime with the largest sum of (3) and (4). A record of no known regime lacks the tokens of all of them; the bound in
(4) leaves it to (3). In the stream (3) decides without (4), because tokens that appear and disappear have a test of
their own (`TokenPresenceTest`).
"""
# Shape suffixes: B buckets, R regimes, T buckets of a record.

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.document_frequency import COMMON
from streamlearn.shift.featurizer import NUM_BUCKETS, Features

SMOOTHING = 1000.0
MAX_ABSENCE_PENALTY = 8.0
"""Nats; the bound in eq. (4)."""
_MIN_DEVIATION = 0.1  # of the logarithm of the length: a tenth longer is never a surprise


def log_ratios(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32]) -> NDArray[np.float32]:
    """Eq. (2) for every regime, in nats, from the counts of the record's buckets."""
    result: NDArray[np.float32] = np.log(c_RT / _background(c_RT, totals_R) + np.float32(SMOOTHING)).sum(axis=1)
    result -= np.float32(c_RT.shape[1]) * np.log(totals_R + np.float32(SMOOTHING))
    return result


def bucket_log_ratios(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32], regime: int) -> NDArray[np.float32]:
    """The terms of eq. (2) for one regime, bucket by bucket."""
    result: NDArray[np.float32] = np.log(c_RT[regime] / _background(c_RT, totals_R) + np.float32(SMOOTHING))
    result -= np.log(totals_R + np.float32(SMOOTHING))[regime]
    return result


def _background(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32]) -> NDArray[np.float32]:
    """Eq. (1)."""
    p_T: NDArray[np.float32] = np.reciprocal(np.maximum(totals_R, np.float32(1.0))) @ c_RT
    p_T += np.float32(1 / NUM_BUCKETS)
    p_T /= np.float32(len(c_RT) + 1)
    return p_T


def length_scores(
    record: Features, mean_R: NDArray[np.float32], deviation_R: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The second term of eq. (3), without its constant."""
    z_R = (np.float32(record.log_length) - mean_R) / deviation_R
    result: NDArray[np.float32] = -0.5 * z_R**2 - np.log(deviation_R)
    return result


@dataclass(frozen=True)
class AbsentTokens:
    """Eq. (4) for every regime, precomputed."""

    terms_RB: NDArray[np.float32]
    """log(1 - s_rb); 0 outside C."""
    totals_R: NDArray[np.float32]
    """The sum for a record without any of the tokens."""

    @classmethod
    def of(cls, frequency_RB: NDArray[np.float32]) -> Self:
        """Precompute eq. (4) from the s_rb, all above 0 and below 1."""
        terms_RB = np.where((frequency_RB >= COMMON).any(axis=0), np.log1p(-frequency_RB), np.float32(0.0))
        return cls(terms_RB, terms_RB.sum(axis=1))

    def scores(self, buckets: NDArray[np.uint16]) -> NDArray[np.float32]:
        """m_r for every regime, in nats."""
        sum_R = self.totals_R - self.terms_RB[:, np.unique(buckets)].sum(axis=1)
        result: NDArray[np.float32] = np.maximum(sum_R, np.float32(-MAX_ABSENCE_PENALTY))
        return result


def count_buckets(buckets: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Number of occurrences of each bucket."""
    return np.bincount(buckets, minlength=NUM_BUCKETS).astype(np.float32)


def length_deviation(total: float, squares: float, number: float) -> float:
    """The sigma of eq. (3) from sums, with a prior of two records at a deviation of 0.5."""
    mean = total / max(number, 1.0)
    variance = (max(squares - number * mean**2, 0.0) + 2 * 0.25) / (number + 2)
    return float(max(variance**0.5, _MIN_DEVIATION))
