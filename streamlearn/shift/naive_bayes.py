"""Which regime a single record belongs to: naive Bayes over hashed tokens, smoothed towards what all regimes share.

    p_b = (sum over regimes of c_rb / c_r, + 1 / B) / (R + 1)                                               (1)
    w_r = sum_(b in record) log((c_rb + a p_b) / (c_r + a)) - log p_b                                       (2)
    score_r = w_r + log N(log length; mu_r, sigma_r)                                                        (3)
    m_r = max(sum_(b in C, not in record) log(1 - s_rb), -8)                                                (4)

c_rb counts bucket b in regime r. The weight a = 1000 tokens of p keeps words that a regime happens not to have shown
yet from deciding; the uniform share of p makes eq. (2) tell something while there is one regime alone. w_r per bucket
is how much better regime r explains a record than records in general do: what a record is about cancels, and it
is the same for all records of a regime but for a little noise (`RegimeProfile.fit`).

What a record does not say tells "is there a" from "is there not a": s_rb is the share of regime r's records that have
bucket b, C the buckets that records of some regime usually have (`COMMON`). A record that is asked about by itself
belongs where (3) and (4) together are largest. The bound in (4) leaves a record of no known regime, which lacks the
words of all, to (3); in the stream, where words that come and go have a test of their own (`word_share`), (3) alone
decides.
"""
# Shape suffixes: B buckets, R regimes, T buckets of a record.

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.document_frequency import COMMON
from streamlearn.shift.featurizer import NUM_BUCKETS, Features

SMOOTHING = 1000.0
MOST_MISSING = 8.0
"""Nats; the bound in eq. (4)."""
_MIN_DEVIATION = 0.1  # of the logarithm of the length: a tenth longer is never a surprise


def log_ratios(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32]) -> NDArray[np.float32]:
    """Eq. (2) for every regime, in nats, from the counts of the record's buckets."""
    result: NDArray[np.float32] = np.log(c_RT / _shared(c_RT, totals_R) + np.float32(SMOOTHING)).sum(axis=1)
    result -= np.float32(c_RT.shape[1]) * np.log(totals_R + np.float32(SMOOTHING))
    return result


def bucket_log_ratios(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32], regime: int) -> NDArray[np.float32]:
    """The terms of eq. (2) for one regime, bucket by bucket."""
    result: NDArray[np.float32] = np.log(c_RT[regime] / _shared(c_RT, totals_R) + np.float32(SMOOTHING))
    result -= np.log(totals_R + np.float32(SMOOTHING))[regime]
    return result


def _shared(c_RT: NDArray[np.float32], totals_R: NDArray[np.float32]) -> NDArray[np.float32]:
    """Eq. (1)."""
    p_T: NDArray[np.float32] = np.reciprocal(np.maximum(totals_R, np.float32(1.0))) @ c_RT
    p_T += np.float32(1 / NUM_BUCKETS)
    p_T /= np.float32(len(c_RT) + 1)
    return p_T


def length_scores(
    record: Features, mean_R: NDArray[np.float32], deviation_R: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The second term of eq. (3)."""
    far_R = (np.float32(record.log_length) - mean_R) / deviation_R
    result: NDArray[np.float32] = -0.5 * far_R**2 - np.log(deviation_R)
    return result


@dataclass(frozen=True)
class MissingTokens:
    """Eq. (4), ready to be asked."""

    terms_RB: NDArray[np.float32]
    """log(1 - s_rb); 0 outside C."""
    totals_R: NDArray[np.float32]
    """Of a record that has no word at all."""

    @classmethod
    def of(cls, shares_RB: NDArray[np.float32]) -> Self:
        """From the s_rb, all above 0 and below 1."""
        terms_RB = np.where((shares_RB >= COMMON).any(axis=0), np.log1p(-shares_RB), np.float32(0.0))
        return cls(terms_RB, terms_RB.sum(axis=1))

    def scores(self, buckets: NDArray[np.uint16]) -> NDArray[np.float32]:
        """m_r for every regime, in nats."""
        found_R = self.totals_R - self.terms_RB[:, np.unique(buckets)].sum(axis=1)
        result: NDArray[np.float32] = np.maximum(found_R, np.float32(-MOST_MISSING))
        return result


def count(buckets: NDArray[np.uint16]) -> NDArray[np.float32]:
    """How often each bucket occurs in a record."""
    return np.bincount(buckets, minlength=NUM_BUCKETS).astype(np.float32)


def length_deviation(total: float, squares: float, number: float) -> float:
    """The sigma of eq. (3) from sums, with the weight of two records at a deviation of a half."""
    mean = total / max(number, 1.0)
    variance = (max(squares - number * mean**2, 0.0) + 2 * 0.25) / (number + 2)
    return float(max(variance**0.5, _MIN_DEVIATION))
