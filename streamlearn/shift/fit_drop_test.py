"""Whether the last records fit the stretch's regime worse than those before them: a t-test on their words.

    T_n = (mean of the last n fits - m) / (s sqrt(f (1 / n + 1 / N))),  f = (1 + rho) / (1 - rho)           (1)

A record's fit is its log ratio per bucket under the regime (`words`, eq. 2); m, s and rho are mean, deviation and lag-1
correlation of the N fits of the stretch before the window. Alarm when T_n falls below the Student quantile of the
level. Short inputs whose mean embeddings hardly differ are told apart by this test, not by `MeanEmbeddingTest`.

    >>> rng = np.random.default_rng(0)
    >>> fits = rng.normal(0.2, 0.1, size=300)
    >>> fits[200:] -= 0.25                                         # planted: from record 200 on
    >>> test, running = FitDropTest(level=1e-8), RunningStats()
    >>> for fit in fits[:100]:
    ...     running = running.after(fit)
    >>> next(t for t in range(132, 300) if test.test(fits[t - 32 : t], running)) - 200
    11
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from streamlearn.shift.mean_embedding_test import WINDOWS, Alarm

MIN_USUAL = 24
MEMORY = 1024.0
_OUTLIER = 5.0


@dataclass(frozen=True)
class RunningStats:
    """Running sums over the fits of a stretch; an outlier counts as `_OUTLIER` deviations."""

    number: float = 0.0
    sum: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    last: float = 0.0

    def after(self, fit: float) -> "RunningStats":
        """With one more."""
        if self.number >= MIN_USUAL:
            far = _OUTLIER * self.deviation
            fit = min(max(fit, self.mean - far), self.mean + far)
        keep = 0.5 if self.number >= MEMORY else 1.0
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
    """The test; it holds no state."""

    level: float
    """Probability of an alarm in one test while nothing changes."""
    windows: tuple[int, ...] = WINDOWS

    def test(self, fits: NDArray[np.float64] | Sequence[float], running: RunningStats) -> Alarm | None:
        """Test the end of the window, newest record last, against the stretch before it."""
        if running.number < MIN_USUAL:
            return None
        for n in self.windows:
            if len(fits) < n:
                continue
            drop = running.mean - sum(fits[-n:]) / n
            chance = running.deviation * (running.inflation * (1 / n + 1 / running.number)) ** 0.5
            if drop > 4.0 * chance and drop > chance * (threshold := -float(stdtrit(running.number - 1, self.level))):
                return Alarm(drop / chance, threshold, n)
        return None


def change_point(fits: Sequence[float], running: RunningStats) -> int:
    """Where in the window the fits fall: the split with the largest likelihood ratio."""
    drops = np.cumsum((running.mean - np.array(fits))[::-1])[::-1]
    sizes = np.arange(len(fits), 0, -1)
    return int((np.maximum(drops, 0.0) ** 2 / sizes).argmax())
