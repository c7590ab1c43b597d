"""Classification of single inputs, without the stream around them: the likeliest regime, and whether it explains them.

An input goes to the regime with the largest sum of eq. (4) and (5) of `memory` and of the log-density of its x
(`features`, eq. 1), with the mean m_r of n_r records of the regime, W of `reference`, eq. (1), and S the mean |x - m|^2
within the regimes:

    g_r = log N(x; m_r, (1 + 1 / n_r) S / D W^-1) + constant                                                (6)

Whether that regime explains it, or none does, is a test by its tokens, to which x adds nothing:

    a = w_r per bucket, with the sign reversed (`memory`, eq. 3)                                            (1)
    b = share of the input's buckets that no record of regime r has                                         (2)
    c = sum_(b in C_r, not in input) log(1 - s_rb) / sum_(b in C_r) log(1 - s_rb)                           (3)
    T = sum over a, b and c of (value - mean_r) / deviation_r                                               (4)

(1) and (2) are large if the input has tokens that the regime lacks, (3) if it lacks tokens that most records of the
regime have (C_r; s_rb is the share of its records with bucket b). Means and deviations are taken over the regime's
exemplars, each scored as if it had not been counted. T of an exemplar is standardized without the exemplar itself, so
it is exchangeable with T of a new record of the regime: a conformal p-value (Vovk et al. 2005) is its rank among the T
of the exemplars of all regimes. Exemplars are assigned like inputs, so those that another regime takes count as well.

A rank cannot be below 1 / n. The largest k = ceil(sqrt(n)) of the n values are therefore taken as exponentially
distributed above the next one, u, as in peaks over threshold (Pickands 1975). With an unknown mean e, estimated from
the k excesses, the predictive tail is that of a Pareto distribution of the second kind (Lomax 1954):

    p(T) = k / n (1 + (T - u) / (k e))^-k  for T > u                                                        (5)

Up to u, p is the rank. It is thus calibrated from the first regime on. Exemplars are classified without their length,
which is not kept for all. They are the sample of each regime, completed by its recent records, which are not
committed to it yet.
"""
# Shape suffixes: B buckets, D features, N exemplars, R regimes, S statistics.

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.change_tests import RecentRecord
from streamlearn.shift.detector import DetectorState
from streamlearn.shift.features import COMMON, NUM_BUCKETS, NUM_FEATURES, DocumentFrequency, Features
from streamlearn.shift.memory import NUM_SAMPLED, AbsentTokens, RegimeMemory, SampledRecord, count_buckets

MIN_EXEMPLARS = 4
"""Exemplars without which a regime is not tested, and explains what is assigned to it: as many as the smaller part of a
regime that is split has (`mixture`)."""
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
class Standardizer:
    """Mean and deviation of each statistic over a regime's own records."""

    mean_S: NDArray[np.float64]
    deviation_S: NDArray[np.float64]

    @classmethod
    def from_samples(cls, values_NS: NDArray[np.float64]) -> Self:
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

    standardizers: Sequence[Standardizer | None]
    """By slot; None for a regime with fewer than `MIN_EXEMPLARS`."""
    calibration_N: NDArray[np.float64]
    """T of the exemplars, ascending."""

    def p_value(self, slot: int, values_S: NDArray[np.float64]) -> float:
        """Share of own records whose T is at least that of an input with these statistics under `slot`."""
        standardizer = self.standardizers[slot]
        if standardizer is None or len(self.calibration_N) < MIN_EXEMPLARS:
            return 1.0
        return self.tail(standardizer.statistic(values_S))

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
    return Standardizer.from_samples(np.delete(values_NS, index, axis=0)).statistic(values_NS[index])


class NoveltyFeatures:
    """Eq. (1) to (3) under one document frequency, precomputed as far as they do not depend on the input."""

    def __init__(self, frequency: DocumentFrequency) -> None:
        expected_B = frequency.expected
        self._seen_B = frequency.records_B != 0
        self._common = np.flatnonzero(expected_B >= COMMON)
        self._weights = -np.log1p(-expected_B[self._common])

    def compute(self, buckets: NDArray[np.uint16], log_ratio: float) -> NDArray[np.float64]:
        """The statistics of a record with this log ratio under the regime, (S,)."""
        present_B = np.zeros(len(self._seen_B), dtype=bool)
        present_B[buckets] = True
        missing = self._weights[~present_B[self._common]].sum()
        return np.array(
            [
                -log_ratio / len(buckets),
                (~self._seen_B[present_B]).mean(),
                missing / max(self._weights.sum(), 1e-9),  # a regime may have no common token
            ]
        )


class InputDensity:
    """Eq. (6) for every regime."""

    def __init__(self, regimes: RegimeMemory, recent: Iterable[RecentRecord]) -> None:
        self._root_DD = np.linalg.cholesky(regimes.metric.astype(np.float64))
        sums_RD, self._number_R = np.zeros((len(regimes), NUM_FEATURES)), np.zeros(len(regimes))
        distances, freedom = 1.0, 1.0  # a prior for the first records: x has length 1
        for slot in regimes.occupied:
            reference, sample = regimes[slot].reference, regimes[slot].sample
            distances += float(np.vdot(reference.scatter, regimes.metric))
            freedom += max(reference.num_records - 1.0, 0.0)
            is_split = reference.num_records < len(sample)  # it began again without the records of the sample
            sums_RD[slot] = np.sum([record.x_D for record in sample], axis=0) if is_split else reference.sum_D
            self._number_R[slot] = max(reference.num_records, len(sample))
        for record in recent:
            sums_RD[record.slot] += record.features.x_D
            self._number_R[record.slot] += 1
        self._sums_RD = sums_RD @ self._root_DD
        self._spread = distances / freedom

    def scores(self, x_D: NDArray[np.float32], own: int | None = None) -> NDArray[np.float64]:
        """g_r in nats; as if it had not been counted in the regime in slot `own`."""
        whitened_D = x_D @ self._root_DD
        is_own_R = np.arange(len(self._number_R)) == own
        number_R = np.maximum(self._number_R - is_own_R, 1.0)
        sums_RD = self._sums_RD - np.outer(is_own_R, whitened_D)
        squares_R = ((whitened_D - sums_RD / number_R[:, None]) ** 2).sum(axis=1)
        scale_R = 1 + 1 / number_R
        result: NDArray[np.float64] = -NUM_FEATURES / 2 * (squares_R / (scale_R * self._spread) + np.log(scale_R))
        return result


class Assignment(NamedTuple):
    """The likeliest regime of an input, and how well it explains the input."""

    slot: int
    """Slot of the likeliest regime."""
    p_value: float
    """Share of the regimes' own records that are explained no better, 0 to 1; 1 before a regime has enough records to
    compare with."""


class RequestClassifier:
    """The classifier under one state of the memory, which must not change while in use, and has a regime."""

    def __init__(self, regimes: RegimeMemory, recent: Sequence[RecentRecord] = ()) -> None:
        """Calibrate the test; `recent` are records that are counted in the memory, but not committed to it yet."""
        self._regimes = regimes
        occupied = regimes.occupied
        self._exemplars: list[list[SampledRecord | Features]] = [[] for _ in range(len(regimes))]
        for slot in occupied:
            self._exemplars[slot] += regimes[slot].sample
        for record in recent:
            if len(self._exemplars[record.slot]) < NUM_SAMPLED:
                self._exemplars[record.slot].append(record.features)
        frequency_RB = np.zeros((len(regimes), NUM_BUCKETS), dtype=np.float32)  # a vacant slot, scored -inf, keeps 0
        for slot in occupied:
            frequency_RB[slot] = regimes[slot].token_frequency.expected
        self._absent = AbsentTokens(frequency_RB)
        self._density = InputDensity(regimes, recent)
        self._values = {slot: NoveltyFeatures(regimes[slot].token_frequency) for slot in occupied}
        values_NS_by_slot = [self._exemplar_values(slot) for slot in range(len(regimes))]
        standardizers = [
            Standardizer.from_samples(values_NS) if len(values_NS) >= MIN_EXEMPLARS else None
            for values_NS in values_NS_by_slot
        ]
        statistics = self._calibration(values_NS_by_slot, standardizers)
        self._test = NoveltyTest(standardizers, np.sort(np.array(statistics, dtype=np.float64)))

    @classmethod
    def from_state(cls, state: DetectorState) -> Self:
        """Build the classifier under a state of the detector, which must remember a regime."""
        regimes = RegimeMemory(len(state.regimes), state.regimes, metric=state.metric)
        return cls(regimes, (*state.segment.window.records, *state.segment.others))

    def assign(self, record: Features, slot: int | None = None) -> Assignment:
        """Classify one input, or say how well the regime in `slot` explains it."""
        scores = self._regimes.score(record)
        total_R = scores.scores_R + self._absent.scores(record.buckets) + self._density.scores(record.x_D)
        slot = int(total_R.argmax()) if slot is None else slot
        values_S = self._values[slot].compute(record.buckets, float(scores.log_ratios_R[slot]))
        return Assignment(slot, self._test.p_value(slot, values_S))

    def _exemplar_values(self, slot: int) -> NDArray[np.float64]:
        """The statistics of a regime's exemplars under it, (N, S), each as if it had not been counted."""
        exemplars = [exemplar.buckets for exemplar in self._exemplars[slot]]
        if not exemplars:
            return np.zeros((0, 3))
        fits_N = self._regimes.exemplar_fits(slot, exemplars)
        frequency = self._regimes[slot].token_frequency
        return np.stack(
            [
                NoveltyFeatures(frequency.without(buckets)).compute(buckets, fit * len(buckets))
                for buckets, fit in zip(exemplars, fits_N.tolist(), strict=True)
            ]
        )

    def _calibration(
        self, values_NS_by_slot: list[NDArray[np.float64]], standardizers: list[Standardizer | None]
    ) -> list[float]:
        """T of each exemplar under the regime that it is assigned to, if that one is tested."""
        per_regime = max(MAX_EXEMPLARS // len(self._regimes.occupied), 1)
        statistics = []
        for own, values_NS in enumerate(values_NS_by_slot):
            for index, exemplar in enumerate(self._exemplars[own][:per_regime]):
                buckets = exemplar.buckets
                log_ratios_R = self._regimes.log_ratios(buckets, {own: count_buckets(buckets)})
                density_R = self._density.scores(exemplar.x_D, own)
                slot = int((log_ratios_R + self._absent.scores(buckets) + density_R).argmax())
                standardizer = standardizers[slot]
                if standardizer is None:
                    continue
                if slot == own:
                    statistics.append(leave_one_out(values_NS, index))
                else:
                    values_S = self._values[slot].compute(buckets, float(log_ratios_R[slot]))
                    statistics.append(standardizer.statistic(values_S))
        return statistics
