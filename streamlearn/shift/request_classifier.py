"""Classification of single inputs, without the stream around them: the likeliest regime, and whether it explains them.

An input goes to the regime with the largest sum of eq. (3) and (4) of `naive_bayes`; `novelty_test` says how well that
regime explains it. Exemplars, on which the test is calibrated, are classified by their tokens only: their full length
is not kept. They are the sample of each regime, completed by its recent records, which are not settled yet.
"""
# Shape suffixes: N exemplars, R regimes, S statistics.

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift import naive_bayes
from streamlearn.shift.assignment import Assignment
from streamlearn.shift.document_frequency import COMMON, DocumentFrequency
from streamlearn.shift.featurizer import NUM_BUCKETS, Features
from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.novelty_test import MAX_EXEMPLARS, MIN_EXEMPLARS, NoveltyTest, Standard, leave_one_out
from streamlearn.shift.recent_record import RecentRecord
from streamlearn.shift.regime_memory import RegimeMemory
from streamlearn.shift.regime_profile import NUM_SAMPLED


class RequestClassifier:
    """The classifier under one state of the memory, which must not change while in use, and has a regime."""

    def __init__(self, regimes: RegimeMemory, recent: Iterable[RecentRecord] = ()) -> None:
        """Calibrate the test; `recent` are records that are counted in the memory, but not offered to a sample yet."""
        self._regimes = regimes
        occupied = regimes.occupied
        self._exemplars: list[list[NDArray[np.uint16]]] = [[] for _ in range(len(regimes))]
        for slot in occupied:
            self._exemplars[slot] += [each.buckets for each in regimes[slot].sample]
        for each in recent:
            if len(self._exemplars[each.slot]) < NUM_SAMPLED:
                self._exemplars[each.slot].append(each.features.buckets)
        frequency_RB = np.zeros((len(regimes), NUM_BUCKETS), dtype=np.float32)  # a vacant slot, scored -inf, keeps 0
        for slot in occupied:
            frequency_RB[slot] = regimes[slot].token_frequency.expected
        self._absent = naive_bayes.AbsentTokens.of(frequency_RB)
        self._values = {slot: _Statistics.under(regimes[slot].token_frequency) for slot in occupied}
        values_NS_by_slot = [self._exemplar_values(slot) for slot in range(len(regimes))]
        standards = [Standard.of(each) if len(each) >= MIN_EXEMPLARS else None for each in values_NS_by_slot]
        self._test = NoveltyTest.calibrated(standards, self._calibration(values_NS_by_slot, standards))

    @classmethod
    def of(cls, state: MonitorState) -> Self:
        """The classifier under a state of the monitor, which must remember a regime."""
        saved, segment = state.detector.regimes, state.detector.segment
        regimes = RegimeMemory(len(saved))
        regimes.load(saved, state.detector.next_number)
        return cls(regimes, (*segment.window.records, *segment.other_records))

    def assign(self, record: Features, slot: int | None = None) -> Assignment:
        """Classify one input, or say how well the regime in `slot` explains it."""
        scores = self._regimes.score(record)
        total_R = scores.scores_R + self._absent.scores(record.buckets)
        slot = int(total_R.argmax()) if slot is None else slot
        values_S = self._values[slot].of(record.buckets, float(scores.log_ratios_R[slot]))
        return Assignment(slot, self._test.p_value(slot, values_S))

    def _frequency(self, slot: int) -> DocumentFrequency:
        return self._regimes[slot].token_frequency

    def _exemplar_values(self, slot: int) -> NDArray[np.float64]:
        """The statistics of a regime's exemplars under it, (N, S), each as if it had not been counted."""
        exemplars = self._exemplars[slot]
        if not exemplars:
            return np.zeros((0, 3))
        fits_N = self._regimes.exemplar_fits(slot, exemplars)
        pairs = zip(exemplars, fits_N.tolist(), strict=True)
        without = [(self._frequency(slot).without(buckets), buckets, fit * len(buckets)) for buckets, fit in pairs]
        return np.stack([_Statistics.under(frequency).of(*each) for frequency, *each in without])

    def _calibration(
        self, values_NS_by_slot: list[NDArray[np.float64]], standards: list[Standard | None]
    ) -> list[float]:
        """T of each exemplar under the regime that it is assigned to, if that one is tested."""
        per_regime = max(MAX_EXEMPLARS // len(self._regimes.occupied), 1)
        found = []
        for own, values_NS in enumerate(values_NS_by_slot):
            for index, buckets in enumerate(self._exemplars[own][:per_regime]):
                counted = {own: naive_bayes.count_buckets(buckets)}
                log_ratios_R = self._regimes.log_ratios(buckets, counted)
                slot = int((log_ratios_R + self._absent.scores(buckets)).argmax())
                standard = standards[slot]
                if standard is None:
                    continue
                if slot == own:
                    found.append(leave_one_out(values_NS, index))
                else:
                    values_S = self._values[slot].of(buckets, float(log_ratios_R[slot]))
                    found.append(standard.statistic(values_S))
        return found


@dataclass(frozen=True, eq=False)
class _Statistics:
    """Eq. (1) to (3) of `novelty_test` under one document frequency, as far as they do not depend on the record."""

    seen_B: NDArray[np.bool_]
    """Tokens that a record of the regime had."""
    common: NDArray[np.int64]
    """Tokens that most of its records have."""
    weights: NDArray[np.float32]
    """Weight of each of them."""

    @classmethod
    def under(cls, frequency: DocumentFrequency) -> Self:
        """Precompute them."""
        expected_B = frequency.expected
        common = np.flatnonzero(expected_B >= COMMON)
        return cls(frequency.records_B != 0, common, -np.log1p(-expected_B[common]))

    def of(self, buckets: NDArray[np.uint16], log_ratio: float) -> NDArray[np.float64]:
        """The statistics of a record with this log ratio under the regime, (S,)."""
        present_B = np.zeros(len(self.seen_B), dtype=bool)
        present_B[buckets] = True
        missing = self.weights[~present_B[self.common]].sum()
        return np.array(
            [
                -log_ratio / len(buckets),
                (~self.seen_B[present_B]).mean(),
                missing / max(self.weights.sum(), 1e-9),  # a regime may have no common token
            ]
        )
