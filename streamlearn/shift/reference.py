"""The distribution of a regime's records, and the chance deviation of the mean of n of them.

    |u|^2 = u^T W u,  W = ((1 - s) P + s tr(P) / D)^-1,  s = D / (D + N)                                    (1)
    tr C = |x - m|^2 averaged,  nu = (tr WC)^2 / tr (WC)^2                                                  (2)
    f = mean of S,  nu_S = 2 f^2 / variance of S,  over the regime's own blocks of n records                (3)

W whitens: P is the covariance of the records within their regimes, over the N records of all regimes, and shrunk
while they are few (Friedman 1989). Directions in which every regime varies count little.

Independent records have f = 1 and nu_S = nu, which is the prior of eq. (3), at the weight of four blocks. Records of
one topic or conversation come in runs, so means of n deviate more, and in few directions: f rises and nu_S falls, and
both raise the threshold. It is the variance by batch means of a serially dependent series (Conway 1963).
"""
# Shape suffixes: D features, N records, W sizes of windows.

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainccinv

from streamlearn.shift.features import NUM_FEATURES

WINDOWS = (16, 32)
"""Records compared: the short window is quick where regimes lie far apart, the long one separates similar regimes."""
BLOCK = WINDOWS[0]
REFERENCE_HALVED_AT = 8192
"""Records at which all sums are halved, so that old records fade."""
_PRIOR_RECORDS, _PRIOR_NU, _PRIOR_BLOCKS = 16.0, 8.0, 4.0

Metric = NDArray[np.float32]
"""The W of eq. (1), (D, D)."""
IDENTITY: Metric = np.eye(NUM_FEATURES, dtype=np.float32)
_HALF = np.float32(0.5)
_FIRST = np.array([[1.0], [0.0]], dtype=np.float32)


def _zeros(*shape: int) -> NDArray[np.float32]:
    return np.zeros((*shape, NUM_FEATURES), dtype=np.float32)


@dataclass(frozen=True, eq=False)
class ReferenceDistribution:
    """The running sums of eq. (1) to (3). A value: updates return a new one."""

    sum_D: NDArray[np.float32] = field(default_factory=_zeros)
    products_DD: NDArray[np.float32] = field(default_factory=partial(_zeros, NUM_FEATURES))
    """Sum of x x^T."""
    block_2D: NDArray[np.float32] = field(default_factory=partial(_zeros, 2))
    """Sums over the block of `BLOCK` records that fills, and over the one before it."""
    block_sizes: tuple[int, int] = (0, 0)
    """Records of both."""
    moments_W3: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(WINDOWS), 3)))
    """By size of window: number of blocks, sum of S and of S^2."""
    num_records: float = 0.0

    @property
    def mean(self) -> NDArray[np.float32]:
        """The mean x."""
        mean_D: NDArray[np.float32] = self.sum_D / np.float32(max(self.num_records, 1.0))
        return mean_D

    @property
    def scatter(self) -> NDArray[np.float32]:
        """Sum of (x - m) (x - m)^T."""
        scatter_DD: NDArray[np.float32] = self.products_DD - np.outer(self.sum_D, self.mean)
        return scatter_DD

    def after(self, x_D: NDArray[np.float32], metric: Metric) -> Self:
        """Return the sums with one more record."""
        sums = replace(
            self,
            sum_D=self.sum_D + x_D,
            products_DD=self.products_DD + np.outer(x_D, x_D),
            block_2D=self.block_2D + _FIRST * x_D,
            block_sizes=(self.block_sizes[0] + 1, self.block_sizes[1]),
            num_records=self.num_records + 1.0,
        )
        if sums.block_sizes[0] == BLOCK:
            sums = sums._with_block(metric)
        if sums.num_records < REFERENCE_HALVED_AT:
            return sums
        return replace(
            sums,
            sum_D=sums.sum_D * _HALF,
            products_DD=sums.products_DD * _HALF,
            block_2D=_zeros(2),
            block_sizes=(0, 0),
            moments_W3=sums.moments_W3 / 2,
            num_records=sums.num_records / 2,
        )

    def _with_block(self, metric: Metric) -> Self:
        """Compare the block that is full, and both blocks together, with all records before them."""
        moments_W3 = self.moments_W3.copy()
        for row, n in enumerate(WINDOWS):
            before = self.num_records - n
            if before >= n and self.block_sizes[row] == BLOCK:
                block_D = self.block_2D[: row + 1].sum(axis=0)
                statistic = Reference(self, metric).compare(block_D / np.float32(n), n, self.sum_D - block_D, before)
                moments_W3[row] += 1.0, statistic, statistic**2
        block_2D = np.stack([_zeros(), self.block_2D[0]])
        return replace(self, moments_W3=moments_W3, block_2D=block_2D, block_sizes=(0, BLOCK))

    def merged(self, other: Self) -> Self:
        """Return the sums over the records of both regimes; a block begins anew."""
        return type(self)(
            self.sum_D + other.sum_D,
            self.products_DD + other.products_DD,
            moments_W3=self.moments_W3 + other.moments_W3,
            num_records=self.num_records + other.num_records,
        )


def pooled_metric(references: Sequence[ReferenceDistribution]) -> Metric:
    """W of eq. (1)."""
    total = sum(reference.num_records for reference in references)
    freedom = total - len(references)
    if freedom < 2:
        return IDENTITY
    pooled_DD = np.sum([reference.scatter for reference in references], axis=0, dtype=np.float64) / freedom
    share = NUM_FEATURES / (NUM_FEATURES + total)
    spread = max(float(np.trace(pooled_DD)) / NUM_FEATURES, 1e-9)
    shrunk_DD = (1 - share) * pooled_DD + share * spread * np.eye(NUM_FEATURES)
    inverse_DD = np.linalg.inv(shrunk_DD)
    metric: Metric = (spread * inverse_DD).astype(np.float32)
    return metric


@dataclass(frozen=True, eq=False)
class Reference:
    """A regime's distribution under a metric."""

    distribution: ReferenceDistribution
    metric: Metric

    @property
    def num_records(self) -> float:
        return self.distribution.num_records

    @cached_property
    def spread(self) -> float:
        """The tr C, without the bias of a mean over few records."""
        total = float(np.vdot(self.distribution.scatter, self.metric))
        return max(total / max(self.num_records - 1.0, 1.0), 1e-6)

    @cached_property
    def freedom(self) -> float:
        """The nu of eq. (2), without the bias of few records, and shrunk towards a prior then."""
        n = max(self.num_records - 1.0, 1.0)
        product_DD = (self.distribution.scatter @ self.metric) / np.float32(n)
        squares = max(float(np.vdot(product_DD, product_DD.T)) - self.spread**2 / n, 0.0)
        squares = (n * squares + _PRIOR_RECORDS * self.spread**2 / _PRIOR_NU) / (n + _PRIOR_RECORDS)
        return max(self.spread**2 / squares, 1.0)

    def distance(self, x_D: NDArray[np.float32]) -> float:
        """|x - m|^2."""
        return self.norm(x_D - self.distribution.mean)

    def statistic(self, mean_D: NDArray[np.float32], n: int, before_ND: NDArray[np.float32] | None = None) -> float:
        """S_n (`change_tests`, eq. 5) between the mean of n records and the regime: near 1 if they are the regime's.

        `before_ND`: further records of the regime, added to its mean.
        """
        before_ND = _zeros(0) if before_ND is None else before_ND
        before_D = self.distribution.sum_D + before_ND.sum(axis=0)
        return self.compare(mean_D, n, before_D, self.num_records + len(before_ND))

    def compare(self, mean_D: NDArray[np.float32], n: int, before_D: NDArray[np.float32], number: float) -> float:
        """S_n (`change_tests`, eq. 5) between the mean of n records and the sum of others."""
        return self.norm(mean_D - before_D / np.float32(number)) / (self.spread * (1 / n + 1 / number))

    def norm(self, difference_D: NDArray[np.float32]) -> float:
        """|u|^2 of eq. (1)."""
        return float(difference_D @ self.metric @ difference_D)

    def threshold(self, level: float, n: int) -> float:
        """The quantile of S_n (`change_tests`, eq. 6)."""
        number, total, squares = self.distribution.moments_W3[0 if n <= BLOCK else 1]
        f = max((_PRIOR_BLOCKS + total) / (_PRIOR_BLOCKS + number), 1.0)
        deviations = squares - 2 * f * total + number * f**2
        nu = 2 * f**2 * (_PRIOR_BLOCKS + number) / (_PRIOR_BLOCKS * 2 * f**2 / self.freedom + deviations)
        return float(f * _quantile(max(nu, 1.0), level))

    def excess(self, level: float, n: int) -> float:
        """How much higher the threshold is than that of independent records, at least 1."""
        return max(self.threshold(level, n) / _quantile(self.freedom, level), 1.0)


def _quantile(nu: float, level: float) -> float:
    """Of a Gamma distribution with mean 1."""
    return float(gammainccinv(nu / 2, level)) * 2 / nu
