"""Which law a loss follows while it falls.

    loss = a exp(-c t)      epsilon is reached after O(log 1/epsilon) iterations, theorem 1's claim for stage III    (1)
    loss = a t^-p           p = 1 is O(1/epsilon), the rate that the paper quotes for a single transformer           (2)

Both are straight lines through log loss, over t and over log t, so least squares and R^2 treat them alike. The proof of
theorem 1 takes lemma 16's upper bound of the gradient for its size throughout stage III; the logistic loss's slope
shrinks with the loss, and then plain gradient descent gives eq. (2). The normalised steps of stage I (eq. 8) do not
shrink, and give eq. (1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SMALLEST = 1e-38  # float32 reaches zero below it


@dataclass(frozen=True)
class Laws:
    """Both fits to one curve."""

    exponential_rate: float
    """C of eq. (1), per iteration."""
    exponential_r2: float
    power_exponent: float
    """P of eq. (2)."""
    power_r2: float


def fit(iterations: Sequence[int], losses: Sequence[float]) -> Laws:
    """Least squares of eq. (1) and (2); iterations count from the start of the phase and are positive."""
    t = np.asarray(iterations, dtype=np.float64)
    log_loss = np.log(np.maximum(np.asarray(losses, dtype=np.float64), SMALLEST))
    rate, exponential_r2 = _line(t, log_loss)
    exponent, power_r2 = _line(np.log(t), log_loss)
    return Laws(-rate, exponential_r2, -exponent, power_r2)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and R^2 of a least-squares line; R^2 is 0 for a constant y."""
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    total = float(dy @ dy)
    return slope, 1 - float(((dy - slope * dx) ** 2).sum()) / total if total > 0 else 0.0
