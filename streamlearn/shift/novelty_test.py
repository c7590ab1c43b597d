"""Novelty detection: whether an input comes from the regime that is likeliest for it, or from none.

    a = w_r per bucket, with the sign reversed (`naive_bayes`, eq. 2)                                       (1)
    b = share of the input's buckets that no record of regime r has                                         (2)
    c = sum_(b in C_r, not in input) log(1 - s_rb) / sum_(b in C_r) log(1 - s_rb)                           (3)
    T = sum over a, b and c of (value - mean_r) / deviation_r                                               (4)

(1) and (2) are large where the input has tokens that the regime lacks, (3) where it lacks tokens that most records of
the regime have (C_r; s_rb is the share of its records with bucket b). Means and deviations are those of the regime's
exemplars, each scored as if it had not been counted. T of an exemplar is standardized without the exemplar itself, so
it is exchangeable with T of a new record of the regime: a conformal p-value (Vovk et al. 2005) is its rank among the T
of the exemplars of all regimes. Exemplars are assigned like inputs, so those that another regime takes count as well.

A rank cannot be below 1 / n. The largest k = ceil(sqrt(n)) of the n values are therefore taken as exponentially
distributed above the next one, u, as in peaks over threshold (Pickands 1975). With an unknown mean e, estimated from
the k excesses, the predictive tail is that of a Pareto distribution of the second kind (Lomax 1954):

    p(T) = k / n (1 + (T - u) / (k e))^-k  for T > u                                                        (5)

Up to u, p is the rank. It is thus calibrated from the first regime on.
"""
# Shape suffixes: B buckets, N exemplars, R regimes, S statistics.

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Self

import numpy as np
from numpy.typing import NDArray

NUM_STATISTICS = 3
"""Eq. (1) to (3)."""
MIN_EXEMPLARS = 4
"""Exemplars without which a regime is not tested, and explains what is assigned to it: as many as the smaller part of a
regime that is split has (`mixture_test`)."""
MAX_EXEMPLARS = 512
"""Maximum exemplars of all regimes together that eq. (5) is calibrated on: it bounds the time, which grows with their
number times that of the regimes."""
PRIOR_WEIGHT = 2.0
"""Weight of the prior deviations, in exemplars."""
PRIOR_DEVIATIONS_S = np.array([0.1, 0.05, 0.03])
"""Of eq. (1), in nats per bucket, (2) and (3): small, for regimes whose exemplars hardly differ in a statistic."""
MIN_EXCESS = 0.1
"""Minimum of e, in deviations: exemplars with equal T do not make every other T impossible."""


@dataclass(frozen=True, eq=False)
class Standard:
    """Mean and deviation of each statistic over a regime's own records."""

    mean_S: NDArray[np.float64]
    deviation_S: NDArray[np.float64]

    @classmethod
    def of(cls, values_NS: NDArray[np.float64]) -> Self:
        """Estimate them from a sample; the deviation is that of a new record from the sample's mean."""
        n = len(values_NS)
        variance_S = (n * values_NS.var(axis=0) + PRIOR_WEIGHT * PRIOR_DEVIATIONS_S**2) / (n + PRIOR_WEIGHT)
        return cls(values_NS.mean(axis=0), np.sqrt(variance_S * (n + 1) / n))

    def statistic(self, values_S: NDArray[np.float64]) -> float:
        """Compute eq. (4)."""
        return float(((values_S - self.mean_S) / self.deviation_S).sum())


@dataclass(frozen=True, eq=False)
class NoveltyTest:
    """The test under one state of the memory."""

    standards: Sequence[Standard | None]
    """By slot; None for a regime with fewer than `MIN_EXEMPLARS`."""
    calibration_N: NDArray[np.float64]
    """T of the exemplars, ascending."""

    @classmethod
    def calibrated(cls, standards: Sequence[Standard | None], statistics: Iterable[float]) -> Self:
        """Build the test from the T of exemplars, see `leave_one_out`."""
        return cls(standards, np.sort(np.fromiter(statistics, dtype=np.float64)))

    def p_value(self, slot: int, values_S: NDArray[np.float64]) -> float:
        """Share of own records whose T is at least that of an input with these statistics under `slot`."""
        standard = self.standards[slot]
        if standard is None or len(self.calibration_N) < MIN_EXEMPLARS:
            return 1.0
        return self.tail(standard.statistic(values_S))

    def tail(self, statistic: float) -> float:
        """Compute eq. (5) above u, and the rank below."""
        n = len(self.calibration_N)
        k = ceil(n**0.5)
        u = self.calibration_N[-k - 1]
        if statistic <= u:
            return float(n - np.searchsorted(self.calibration_N, statistic)) / n
        excess = max(float(self.calibration_N[-k:].mean() - u), MIN_EXCESS)
        return float(k / n * (1 + (statistic - u) / (k * excess)) ** -k)


def leave_one_out(values_NS: NDArray[np.float64], index: int) -> float:
    """Compute T of one exemplar, standardized by the others."""
    return Standard.of(np.delete(values_NS, index, axis=0)).statistic(values_NS[index])
