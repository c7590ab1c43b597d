"""The records of an alarm are the segment's after all, a known regime's, or new."""

from collections.abc import Sequence

import pytest
from streamlearn.shift.input_shift import CLEARLY_DISTINCT, DISTINCT, LONG, Classification, SegmentClassifier

from streamlearn.shift import detector as segment_classifier
from streamlearn.shift.change_tests import Alarm, MeanEmbeddingTest, RecentRecord, TokenChange
from streamlearn.shift.memory import RegimeMemory
from tests.shift.records import features_of, memory_of, recent


def classify(
    regimes: RegimeMemory,
    records: tuple[RecentRecord, ...],
    *,
    before: tuple[RecentRecord, ...] = (),
    change: TokenChange | None = None,
) -> Classification:
    classifier = SegmentClassifier(regimes, MeanEmbeddingTest(level=1e-7))
    return classifier.classify(Alarm(9.0, 5.0, records, change), (*before, *records), here=0)


def test_records_of_a_known_regime_are_known() -> None:
    """Although they were counted in the segment's regime."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    records = recent(features_of(1, 12, seed=9), 0, start=201, regimes=regimes)
    found = classify(regimes, records)
    assert (found.slot, found.known, found.records) == (1, True, records)


def test_records_of_no_known_regime_are_new() -> None:
    """Of the recent records, only the new ones."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    before = recent(features_of(0, 12, seed=8), 0, start=201, regimes=regimes)
    records = recent(features_of(2, 12, seed=9), 0, start=213, regimes=regimes)
    found = classify(regimes, records, before=before)
    assert not found.known
    assert found.records == records


def test_the_segments_own_records_are_its_own() -> None:
    """An alarm without a change is a false alarm."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    records = recent(features_of(0, 12, seed=9), 0, start=201, regimes=regimes)
    found = classify(regimes, records)
    assert (found.slot, found.known) == (0, True)


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

    monkeypatch.setattr(segment_classifier, "distinctness", measured)
    found = classify(regimes, records, before=before)
    assert (found.slot == 0 and found.known) == known
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
    monkeypatch.setattr(segment_classifier, "distinctness", lambda *_: statistic)
    monkeypatch.setattr(segment_classifier, "begin_alike", lambda _: alike)
    found = classify(regimes, records)
    assert (found.slot == 0 and found.known) == known


def test_records_are_new_where_the_segment_has_too_few_to_compare_with() -> None:
    """A regime whose sample is empty, and all of whose recent records are in doubt."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    records = recent(features_of(2, 12, seed=9), 0, start=201, regimes=regimes)
    regimes[0].sample = ()
    assert not classify(regimes, records).known


def test_a_token_change_is_never_the_segments_regime() -> None:
    """However well the records fit it."""
    regimes = memory_of((0, 100), max_regimes=4)
    records = recent(features_of(0, 12, seed=9), 0, start=101, regimes=regimes)
    assert not classify(regimes, records, change=TokenChange(7, True, 30.0, 20.0)).known


@pytest.mark.parametrize(("statistic", "known"), [(DISTINCT - 0.1, True), (DISTINCT + 0.1, False)])
def test_records_that_are_distinct_from_the_regimes_own_are_new(
    statistic: float, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the regime explains them: one of many topics explains any."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=4)
    records = recent(features_of(1, 12, seed=9), 0, start=201, regimes=regimes)
    monkeypatch.setattr(segment_classifier, "distinctness", lambda *_: statistic)
    assert classify(regimes, records).known == known
