"""Which regime a single record belongs to: naive Bayes over hashed tokens, smoothed towards what all regimes share.

    score_r = sum_(b in record) log((c_rb + a p_b) / (c_r + a)) + log N(log length; mu_r, sigma_r)          (1)
    p_b = mean over regimes of c_rb / c_r, and a little everywhere                                          (2)

c_rb counts bucket b in regime r. The weight a = 1000 tokens of p keeps words that a regime happens not to have shown
yet from deciding.
"""
# Shape suffixes: B buckets, R regimes, T tokens of a record.

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.signature import NUM_BUCKETS, Signature

SMOOTHING = 1000.0
FLOOR = 1e-5
_MIN_DEVIATION = 0.1  # of the logarithm of the length: a tenth longer is never a surprise


def scores(
    record: Signature,
    counts_RB: NDArray[np.float32],
    totals_R: NDArray[np.float32],
    length_mean_R: NDArray[np.float32],
    length_deviation_R: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Eq. (1) for every regime, in nats."""
    c_RT = counts_RB.take(record.buckets, axis=1)
    totals_R1 = totals_R[:, None]
    p_T = (c_RT / np.maximum(totals_R1, 1.0)).mean(axis=0) + np.float32(FLOOR)
    word_R = np.log((c_RT + np.float32(SMOOTHING) * p_T) / (totals_R1 + np.float32(SMOOTHING))).sum(axis=1)
    far_R = (np.float32(record.log_length) - length_mean_R) / length_deviation_R
    result: NDArray[np.float32] = word_R - 0.5 * far_R**2 - np.log(length_deviation_R)
    return result


def count(record: Signature) -> NDArray[np.float32]:
    """How often each bucket occurs in a record."""
    return np.bincount(record.buckets, minlength=NUM_BUCKETS).astype(np.float32)


def length_deviation(total: float, squares: float, number: float) -> float:
    """The sigma of eq. (1) from sums, with the weight of two records at a deviation of a half."""
    mean = total / max(number, 1.0)
    variance = (max(squares - number * mean**2, 0.0) + 2 * 0.25) / (number + 2)
    return float(max(variance**0.5, _MIN_DEVIATION))
