"""Change of the inputs' distribution: a two-sample test on mean embeddings.

    S_n = |m_n - m|^2 / (tr C f_n (1 / n + 1 / N))                                                          (1)
    S_n ~ Gamma(nu / 2, 2 / nu) under no change; alarm when S_n exceeds the quantile of the level           (2)

m_n is the mean phi of the last n records, m that of the N earlier records of the regime; `ReferenceDistribution`
defines tr C, f_n and nu. The Gamma is the Satterthwaite fit to a weighted sum of chi-squares. Two windows are tested:
the short one is quick where regimes lie far apart, the long one separates regimes that lie close together.

    >>> rng = np.random.default_rng(0)
    >>> phi = rng.normal(size=(300, 256)).astype(np.float32)
    >>> phi[200:, 0] += 8.0                                        # planted: from record 200 on
    >>> phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    >>> test, reference = MeanEmbeddingTest(level=1e-8), ReferenceDistribution()
    >>> reference.add_all(phi[:100])
    >>> next(t for t in range(132, 300) if test.test(phi[t - 32 : t], reference)) - 200
    11
"""
# Shape suffixes: D features, N records of a window.

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainccinv

from streamlearn.shift.reference_distribution import ReferenceDistribution

WINDOWS = (16, 32)
MIN_REFERENCE = 16
LOWEST_THRESHOLD = 1.5
"""Every threshold lies above it, because nu is never large enough; a smaller statistic needs no quantile."""


@dataclass(frozen=True)
class Rejection:
    """A statistic that exceeded its threshold, and the number of newest records it was computed from."""

    statistic: float
    threshold: float
    window: int


@dataclass(frozen=True)
class MeanEmbeddingTest:
    """The stateless test."""

    level: float
    """Probability of an alarm in one test under no change."""
    windows: tuple[int, ...] = WINDOWS
    serial_correlation: bool = True
    """Whether f_n is estimated; otherwise records count as independent."""

    def test(self, window_ND: NDArray[np.float32], reference: ReferenceDistribution) -> Rejection | None:
        """Test the newest records of the window, which come last, against the regime's records before them."""
        for n in self.windows:
            num_records = reference.num_records + len(window_ND) - n
            if len(window_ND) < n or num_records < MIN_REFERENCE or reference.num_records < 2:
                continue
            sum_D = reference.sum_D + np.add.reduce(window_ND[:-n], axis=0)
            mean_D = np.add.reduce(window_ND[-n:], axis=0) / np.float32(n)
            statistic = self._statistic(mean_D, sum_D / num_records, reference, n, num_records)
            if statistic > LOWEST_THRESHOLD and statistic > (threshold := self.threshold(reference)):
                return Rejection(statistic, threshold, n)
        return None

    def distance(self, mean_D: NDArray[np.float32], n: int, reference: ReferenceDistribution) -> float:
        """S_n between the mean of n records and a remembered regime: near 1 if the records are the regime's."""
        return self._statistic(mean_D, reference.mean, reference, n, reference.num_records)

    def threshold(self, reference: ReferenceDistribution) -> float:
        """The quantile of eq. (2)."""
        nu = reference.freedom
        return float(gammainccinv(nu / 2, self.level)) * 2 / nu

    @staticmethod
    def change_point(window_ND: NDArray[np.float32], reference: ReferenceDistribution) -> int:
        """Index in the window at which the new distribution begins: the split with the largest likelihood ratio.

        argmax over s of k |mean(window[s:]) - m|^2 with k = N - s, for spherical noise
        """
        centred_ND = window_ND - reference.mean.astype(np.float32)
        tails_ND = np.cumsum(centred_ND[::-1], axis=0)[::-1]
        sizes = np.arange(len(window_ND), 0, -1)
        return int(((tails_ND**2).sum(axis=1) / sizes).argmax())

    def _statistic(
        self,
        mean_D: NDArray[np.float32],
        m_D: NDArray[np.float64],
        reference: ReferenceDistribution,
        n: int,
        num_records: float,
    ) -> float:
        difference = mean_D - m_D
        variance = reference.spread * (1 / n + 1 / num_records)
        statistic = float(difference @ difference) / variance
        if statistic > LOWEST_THRESHOLD and self.serial_correlation:  # f_n costs more than the rest and is at least 1
            statistic /= reference.inflation(n)
        return statistic
