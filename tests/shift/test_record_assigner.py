"""A record leaves the segment's regime only for one to which it clearly belongs."""

import numpy as np
from streamlearn.shift.input_shift import MARGIN, PARENT_MARGIN, RecordAssigner

from streamlearn.shift.detector import NO_SLOT
from streamlearn.shift.features import Features
from streamlearn.shift.memory import RegimeMemory, RegimeScores
from tests.shift.records import features_of, memory_of


def assign(regimes: RegimeMemory, records: list[Features], here: int, parent: int = NO_SLOT) -> list[int]:
    assigner = RecordAssigner(regimes)
    return [assigner.assign(each, regimes.score(each), here, parent) for each in records]


def test_a_known_regimes_record_leaves_the_segment() -> None:
    """From either side, for the regime that explains it."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=3)
    for here in (0, 1):
        assert assign(regimes, features_of(1, 20, seed=9), here).count(1) >= 19


def test_a_record_of_no_known_regime_stays() -> None:
    """It may begin a new regime, which no known one explains."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=3)
    assert assign(regimes, features_of(2, 20, seed=9), here=0) == [0] * 20


def test_a_regime_of_few_records_claims_none() -> None:
    """Its profile is not reliable yet."""
    regimes = memory_of((0, 100), (1, 20), max_regimes=3)
    assert assign(regimes, features_of(1, 20, seed=9), here=0) == [0] * 20


def test_a_parent_needs_more_to_take_a_record_from_its_young_child() -> None:
    """`MARGIN` is enough for another regime; a parent needs `PARENT_MARGIN` per bucket in addition."""
    regimes = memory_of((0, 100), (1, 40), max_regimes=3)
    [record] = features_of(0, 1, seed=9)
    assigner = RecordAssigner(regimes)
    log_ratios_R = regimes.score(record).log_ratios_R
    parents_margin = MARGIN + PARENT_MARGIN * len(record.buckets)
    slots = []
    for lead in (MARGIN - 1, MARGIN + 1, parents_margin - 1, parents_margin + 1):
        scores = RegimeScores(log_ratios_R, np.array([lead, 0.0], dtype=np.float32))
        slots.append([assigner.assign(record, scores, 1, parent) for parent in (NO_SLOT, 0)])
    assert slots == [[1, 1], [0, 1], [0, 1], [0, 0]]
