"""Fits of a falling loss to an exponential and to a power law.

    loss = a exp(-c t)      epsilon is reached after O(log 1/epsilon) iterations, theorem 1's claim for stage III    (1)
    loss = a t^-p           p = 1 is O(1/epsilon), the rate that the paper quotes for a single transformer           (2)

In log loss both are straight lines, over t and over log t, so their R^2 are comparable. The proof of theorem 1 uses
lemma 16's upper bound of the gradient as its size throughout stage III. The slope of the logistic loss shrinks with the
loss, and plain gradient descent then gives eq. (2). The normalised steps of stage I (eq. 8) do not shrink and give
eq. (1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SMALLEST = 1e-38  # float32 underflows to zero below it


@dataclass(frozen=True)
class DecayFits:
    """Both fits to one loss curve."""

    exponential_rate: float
    """c of eq. (1), per iteration."""
    exponential_r2: float
    power_exponent: float
    """p of eq. (2)."""
    power_r2: float


def fit(iterations: Sequence[int], losses: Sequence[float]) -> DecayFits:
    """Fit eq. (1) and (2) by least squares; iterations count from 1 at the start of the phase."""
    t = np.asarray(iterations, dtype=np.float64)
    log_loss = np.log(np.maximum(np.asarray(losses, dtype=np.float64), SMALLEST))
    rate, exponential_r2 = _line(t, log_loss)
    exponent, power_r2 = _line(np.log(t), log_loss)
    return DecayFits(-rate, exponential_r2, -exponent, power_r2)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and R^2 of a least-squares line; R^2 is 0 when y is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    total = float(dy @ dy)
    return slope, 1 - float(((dy - slope * dx) ** 2).sum()) / total if total > 0 else 0.0
