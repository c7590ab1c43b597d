"""The distribution of a regime's records, and the chance deviation of the mean of n of them.

    m = mean phi,  tr C = 1 - |m|^2  because |phi| = 1                                                      (1)
    g_k = <phi_t, phi_(t+k)> averaged over t, less |m|^2                                                    (2)
    f_n = 1 + 2 sum_(0 < k < n) (1 - k / n) g_k / tr C                                                      (3)
    nu = (tr C)^2 / tr(C^2),  tr(C^2) = <phi_s - m, phi_t - m>^2 averaged over pairs far apart              (4)

The mean of n consecutive records has variance tr C f_n / n, the variance of a mean of a serially dependent series;
independent records have f_n = 1. A stream that comes in bursts thus raises its own threshold.
"""
# Shape suffixes: D features, L lags, N records of a window.

from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.featurizer import NUM_FEATURES

NUM_LAGS = 32
HALVED_AT = 8192
"""Records at which all sums are halved, so that old records fade."""
_FAR = NUM_LAGS // 2  # pairs at least this far apart count as independent in eq. (4)
_EVERY = 4  # one record in four enters eq. (4), which costs more than all the rest
_PRIOR_PAIRS, _PRIOR_NU = 16.0, 8.0


def _zeros(size: int) -> NDArray[np.float64]:
    return np.zeros(size)


@dataclass(eq=False)
class ReferenceDistribution:
    """The running sums of eq. (1) to (4)."""

    ROW: ClassVar[int] = NUM_FEATURES + 2 * NUM_LAGS + 3
    sum_D: NDArray[np.float64] = field(default_factory=lambda: _zeros(NUM_FEATURES))
    products_L: NDArray[np.float64] = field(default_factory=lambda: _zeros(NUM_LAGS))
    pairs_L: NDArray[np.float64] = field(default_factory=lambda: _zeros(NUM_LAGS))
    num_records: float = 0.0
    squares: float = 0.0
    num_squares: float = 0.0

    def copy(self) -> Self:
        """An independent copy."""
        return type(self).from_row(self.to_row())

    @property
    def mean(self) -> NDArray[np.float64]:
        """The m of eq. (1)."""
        return self.sum_D / max(self.num_records, 1.0)

    def add(self, phi_D: NDArray[np.float32], following_ND: NDArray[np.float32]) -> None:
        """Add one record; the records that came right after it serve eq. (2) and (4)."""
        num = min(len(following_ND), NUM_LAGS - 1)
        if num:
            after_ND = following_ND[:num]
            products = after_ND @ phi_D
            self.products_L[1 : num + 1] += products
            self.pairs_L[1 : num + 1] += 1.0
            if num > _FAR and self.num_records >= _FAR and self.num_records % _EVERY == 0:
                m_D = self.mean.astype(np.float32)
                centred = products - phi_D @ m_D - after_ND @ m_D + m_D @ m_D
                self.squares += float((centred[_FAR:] ** 2).sum())
                self.num_squares += num - _FAR
        self.sum_D += phi_D
        self.num_records += 1.0
        if self.num_records >= HALVED_AT:
            self._load_row(self.to_row() / 2)

    def add_all(self, phi_ND: NDArray[np.float32]) -> None:
        """Add consecutive records."""
        for i in range(len(phi_ND)):
            self.add(phi_ND[i], phi_ND[i + 1 :])

    @property
    def spread(self) -> float:
        """The tr C, without the bias of a mean over few records."""
        m_D = self.mean
        return max(1.0 - float(m_D @ m_D), 1e-6) * self.num_records / max(self.num_records - 1.0, 1.0)

    def inflation(self, n: int) -> float:
        """f_n of eq. (3), at least 1; records farther apart than the lags kept count as independent."""
        if self.num_records < NUM_LAGS:
            return 1.0
        m_D, spread = self.mean, self.spread
        lags = np.arange(1, min(n, NUM_LAGS))
        lags = lags[self.pairs_L[lags] > 0]
        covariance = self.products_L[lags] / self.pairs_L[lags] - (float(m_D @ m_D) - spread / self.num_records)
        return max(1.0, 1.0 + 2.0 * float(((1.0 - lags / n) * covariance).sum()) / spread)

    @property
    def freedom(self) -> float:
        """The nu of eq. (4), shrunk towards a prior while the regime has few records."""
        spread = self.spread
        squares = self.squares + _PRIOR_PAIRS * spread**2 / _PRIOR_NU
        return max(spread**2 * (self.num_squares + _PRIOR_PAIRS) / squares, 1.0)

    def merge(self, other: Self) -> None:
        """Add the sums of another regime."""
        self._load_row(self.to_row() + other.to_row())

    def to_row(self) -> NDArray[np.float64]:
        """All sums, as `ROW` numbers."""
        return np.concatenate(
            [self.sum_D, self.products_L, self.pairs_L, [self.num_records, self.squares, self.num_squares]]
        )

    @classmethod
    def from_row(cls, row: NDArray[np.float64]) -> Self:
        """Inverse of `to_row`."""
        made = cls()
        made._load_row(row)
        return made

    def _load_row(self, row: NDArray[np.float64]) -> None:
        self.sum_D, self.products_L, self.pairs_L, rest = (
            part.copy() for part in np.split(row, np.cumsum([NUM_FEATURES, NUM_LAGS, NUM_LAGS]))
        )
        self.num_records, self.squares, self.num_squares = rest.tolist()
