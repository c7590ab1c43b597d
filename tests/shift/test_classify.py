"""The rules that decide which regime a record, or the records of an alarm, belong to."""

from collections.abc import Sequence

import numpy as np
import pytest

from streamlearn.shift import classify as rules
from streamlearn.shift.change_tests import Alarm, RecentRecord, TokenChange
from streamlearn.shift.classify import (
    CLEARLY_DISTINCT,
    DISTINCT,
    FAR,
    LONG,
    MARGIN,
    PARENT_MARGIN,
    Classification,
    assign_record,
)
from streamlearn.shift.detector import NO_SLOT
from streamlearn.shift.features import Features
from streamlearn.shift.memory import RegimeMemory, RegimeScores
from tests.shift.records import features_of, memory_of, recent


def assign(regimes: RegimeMemory, records: list[Features], here: int, parent: int = NO_SLOT) -> list[int]:
    return [assign_record(record, regimes.score(record), here, parent, regimes) for record in records]


def test_a_known_regimes_record_leaves_the_segment() -> None:
    """From either side, for the regime that explains it."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=3)
    for here in (0, 1):
        assert assign(regimes, features_of(1, 20, seed=9), here).count(1) >= 19


def test_a_record_of_no_known_regime_stays() -> None:
    """It may begin a new regime, which no known one explains."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=3)
    assert assign(regimes, features_of(2, 20, seed=9), here=0) == [0] * 20


def test_a_parent_needs_more_to_take_a_record_from_its_young_child() -> None:
    """`MARGIN` is enough for another regime; a parent needs `PARENT_MARGIN` per bucket in addition."""
    regimes = memory_of((0, 100), (1, 40), max_regimes=3)
    [record] = features_of(0, 1, seed=9)
    log_ratios_R = regimes.score(record).log_ratios_R
    parents_margin = MARGIN + PARENT_MARGIN * len(record.buckets)
    slots = []
    for lead in (MARGIN - 1, MARGIN + 1, parents_margin - 1, parents_margin + 1):
        scores = RegimeScores(log_ratios_R, np.array([lead, 0.0], dtype=np.float32))
        slots.append([assign_record(record, scores, 1, parent, regimes) for parent in (NO_SLOT, 0)])
    assert slots == [[1, 1], [0, 1], [0, 1], [0, 0]]


def classify(
    regimes: RegimeMemory,
    records: tuple[RecentRecord, ...],
    *,
    before: tuple[RecentRecord, ...] = (),
    change: TokenChange | None = None,
    statistic: float = 9.0,
) -> Classification:
    alarm = Alarm(statistic, 5.0, records, change)
    return rules.classify(alarm, (*before, *records), 0, regimes)


def test_records_of_a_known_regime_are_known() -> None:
    """Although they were counted in the segment's regime."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    records = recent(features_of(1, 12, seed=9), 0, start=201, regimes=regimes)
    result = classify(regimes, records)
    assert (result.slot, result.known, result.records) == (1, True, records)


def test_records_of_no_known_regime_are_new() -> None:
    """Of the recent records, only the new ones."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    before = recent(features_of(0, 12, seed=8), 0, start=201, regimes=regimes)
    records = recent(features_of(2, 12, seed=9), 0, start=213, regimes=regimes)
    result = classify(regimes, records, before=before)
    assert not result.known
    assert result.records == records


@pytest.mark.parametrize(("statistic", "known"), [(DISTINCT - 0.1, True), (DISTINCT + 0.1, False)])
def test_records_that_are_not_distinct_from_the_segments_are_its_own(
    statistic: float, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although no regime explains them: a topic of the same task may be as unlikely as another task."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    before = recent(features_of(0, 12, seed=8), 0, start=201, regimes=regimes)
    records = recent(features_of(2, 12, seed=9), 0, start=213, regimes=regimes)
    compared: list[int] = []

    def measured(ones: Sequence[object], others: Sequence[object]) -> float:
        compared.append(len(others))
        return statistic

    monkeypatch.setattr(rules, "distinctness", measured)
    result = classify(regimes, records, before=before)
    assert (result.slot == 0 and result.known) == known
    assert compared[-1] == len(regimes[0].exemplars) + len(before)


@pytest.mark.parametrize(
    ("statistic", "number", "alike", "known"),
    [
        (CLEARLY_DISTINCT - 0.1, LONG - 1, True, True),
        (CLEARLY_DISTINCT - 0.1, LONG - 1, False, False),
        (CLEARLY_DISTINCT + 0.1, LONG - 1, True, False),
        (CLEARLY_DISTINCT - 0.1, LONG, True, False),
    ],
)
def test_records_of_one_instruction_are_new_if_clearly_distinct_or_many(
    statistic: float, number: int, alike: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task asks about many topics, but tasks may also share the beginning of their prompts."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    records = recent(features_of(2, number, seed=9), 0, start=201, regimes=regimes)
    monkeypatch.setattr(rules, "distinctness", lambda *_: statistic)
    monkeypatch.setattr(rules, "begin_alike", lambda _: alike)
    result = classify(regimes, records)
    assert (result.slot == 0 and result.known) == known


@pytest.mark.parametrize(("statistic", "known"), [(DISTINCT - 0.1, True), (DISTINCT + 0.1, False)])
def test_records_that_are_distinct_from_the_regimes_own_are_new(
    statistic: float, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the regime explains them: one of many topics explains any."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    records = recent(features_of(1, 12, seed=9), 0, start=201, regimes=regimes)
    monkeypatch.setattr(rules, "distinctness", lambda *_: statistic)
    assert classify(regimes, records).known == known


@pytest.mark.parametrize(
    ("distinctness", "statistic", "known"),
    [
        (CLEARLY_DISTINCT + 0.1, 5.0 * FAR + 1, False),
        (CLEARLY_DISTINCT - 0.1, 5.0 * FAR + 1, True),
        (CLEARLY_DISTINCT + 0.1, 5.0 * FAR - 1, True),
    ],
)
def test_records_that_fit_the_segments_regime_are_new_if_distinct_and_far(
    distinctness: float, statistic: float, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A regime whose own records fit it unevenly takes any record for its own by its tokens."""
    regimes = memory_of((0, 100), max_regimes=4)
    regimes.change(0, fit_scale=100.0)
    records = recent(features_of(2, LONG, seed=9), 0, start=201, regimes=regimes)
    monkeypatch.setattr(rules, "distinctness", lambda *_: distinctness)
    assert classify(regimes, records, statistic=statistic).known == known
