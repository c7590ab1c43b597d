"""Drop of the records' fit to the segment's regime: a t-test on their tokens.

    T_n = (mean of the last n fits - m) / (s sqrt(f (1 / n + 1 / N))),  f = (1 + rho) / (1 - rho)           (1)

A record's fit is its log ratio per bucket under the regime (`naive_bayes`, eq. 2). m, s and rho are mean, deviation
and lag-1 correlation of the N fits of the segment before the window. Alarm when T_n falls below the Student quantile of
the level. This test separates short inputs whose mean embeddings hardly differ, which `MeanEmbeddingTest` misses.

    >>> rng = np.random.default_rng(0)
    >>> fits = rng.normal(0.2, 0.1, size=300)
    >>> fits[200:] -= 0.25                                         # planted: from record 200 on
    >>> test, before = FitDropTest(level=1e-8), RunningStats()
    >>> for fit in fits[:100]:
    ...     before = before.after(fit)
    >>> next(t for t in range(132, 300) if test.test(fits[t - 32 : t], before)) - 200
    11
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from streamlearn.shift.mean_embedding_test import WINDOWS, Rejection

MIN_FITS = 24
"""Fits before the window without which nothing is tested and no fit counts as an outlier."""
HALVED_AT = 1024.0
"""Fits at which the sums are halved, so that old records fade."""
MIN_STATISTIC = 4.0
"""A smaller statistic never raises an alarm; the quantile of the default level is larger anyway (4.9)."""
_OUTLIER = 5.0


@dataclass(frozen=True)
class RunningStats:
    """Running sums over the fits of a segment; outliers are clipped at `_OUTLIER` deviations."""

    number: float = 0.0
    sum: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    last: float = 0.0

    def after(self, fit: float) -> "RunningStats":
        """Return the sums with one more fit."""
        if self.number >= MIN_FITS:
            bound = _OUTLIER * self.deviation
            fit = min(max(fit, self.mean - bound), self.mean + bound)
        keep = 0.5 if self.number >= HALVED_AT else 1.0
        return RunningStats(
            keep * self.number + 1.0,
            keep * self.sum + fit,
            keep * self.squares + fit**2,
            keep * self.products + fit * (self.last if self.number else fit),
            fit,
        )

    @property
    def mean(self) -> float:
        """The m of eq. (1)."""
        return self.sum / self.number

    @property
    def deviation(self) -> float:
        """The s of eq. (1)."""
        return float(max(self.squares / self.number - self.mean**2, 1e-6) ** 0.5)

    @property
    def inflation(self) -> float:
        """The f of eq. (1), at least 1."""
        rho = (self.products / self.number - self.mean**2) / self.deviation**2
        rho = min(max(rho, 0.0), 0.9)
        return (1 + rho) / (1 - rho)


@dataclass(frozen=True)
class FitDropTest:
    """The stateless test."""

    level: float
    """Probability of an alarm in one test under no change."""
    windows: tuple[int, ...] = WINDOWS

    def test(self, fits: NDArray[np.float64] | Sequence[float], before: RunningStats) -> Rejection | None:
        """Test the newest fits of the window, which come last, against the segment before the window."""
        if before.number < MIN_FITS:
            return None
        for n in self.windows:
            if len(fits) < n:
                continue
            drop = before.mean - sum(fits[-n:]) / n
            error = before.deviation * (before.inflation * (1 / n + 1 / before.number)) ** 0.5
            if drop > MIN_STATISTIC * error and drop > error * (
                threshold := -float(stdtrit(before.number - 1, self.level))
            ):
                return Rejection(drop / error, threshold, n)
        return None

    @staticmethod
    def change_point(fits: Sequence[float], before: RunningStats) -> int:
        """Index in the window at which the fits drop: the split with the largest likelihood ratio."""
        drops = np.cumsum((before.mean - np.array(fits))[::-1])[::-1]
        sizes = np.arange(len(fits), 0, -1)
        return int((np.maximum(drops, 0.0) ** 2 / sizes).argmax())
