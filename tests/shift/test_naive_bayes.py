"""Naive Bayes over hashed tokens follows its equations."""

import math

import numpy as np
import torch

from streamlearn.shift.features import NUM_BUCKETS
from streamlearn.shift.memory import SMOOTHING, AbsentTokens, bucket_log_ratios, log_ratios

COUNTS = np.array([[30, 0, 10, 0], [0, 5, 1, 2]], dtype=np.float32)
TOTALS = np.array([400, 80], dtype=np.float32)


def equation_2(buckets: list[int], regime: int) -> float:
    """Eq. (2), one bucket after the other."""
    total = 0.0
    for b in buckets:
        p = sum(COUNTS[r][b] / TOTALS[r] for r in range(2)) + 1 / NUM_BUCKETS
        p /= 3
        smoothed = (COUNTS[regime][b] + SMOOTHING * p) / (TOTALS[regime] + SMOOTHING)
        total += math.log(smoothed / p)
    return total


def test_log_ratios_are_equation_2() -> None:
    """For every regime, over all buckets, including those that were never counted."""
    buckets = [0, 1, 2, 2, 3]
    expected = [equation_2(buckets, regime) for regime in range(2)]
    c_RT = COUNTS[:, buckets]
    torch.testing.assert_close(log_ratios(c_RT, TOTALS).tolist(), expected, rtol=1e-4, atol=1e-4)
    sums = [float(bucket_log_ratios(c_RT, TOTALS, regime).sum()) for regime in range(2)]
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)


def test_absent_tokens_are_equation_4() -> None:
    """Only tokens that are common in some regime count, and their sum is bounded."""
    frequency_RB = np.array([[0.9, 0.1, 0.5, 0.99], [0.2, 0.7, 0.3, 0.99]], dtype=np.float32)
    absent = AbsentTokens.of(frequency_RB)
    # Bucket 2 is in C of neither regime; 0 and 3 are present, 0 twice.
    scores = absent.scores(np.array([0, 3, 0], dtype=np.uint16))
    torch.testing.assert_close(scores.tolist(), [math.log(0.9), math.log(0.3)], rtol=1e-4, atol=1e-4)
    scores = absent.scores(np.array([2], dtype=np.uint16))
    second = math.log(0.8) + math.log(0.3) + math.log(0.01)
    torch.testing.assert_close(scores.tolist(), [max(math.log(0.1 * 0.9 * 0.01), -8.0), second], rtol=1e-4, atol=1e-4)
    nothing = np.array([], dtype=np.uint16)
    assert absent.scores(nothing)[0] > -8.0
    assert AbsentTokens.of(frequency_RB.repeat(3, axis=1)).scores(nothing).tolist() == [-8.0, -8.0]
