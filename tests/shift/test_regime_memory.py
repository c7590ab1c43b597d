"""The memory is bounded; merged or dropped is the regime of least worth."""

import numpy as np

from streamlearn.shift.featurizer import Features, Featurizer
from streamlearn.shift.regime_memory import RegimeMemory
from streamlearn.shift.request_classifier import RequestClassifier
from tests.shift.records import features_of, fill, memory_of


def numbers(regimes: RegimeMemory) -> list[int]:
    return [regimes[slot].number for slot in range(len(regimes))]


def test_two_profiles_of_one_regime_are_merged_first() -> None:
    """The older keeps its number and counts the records of both."""
    regimes = memory_of((0, 100), (1, 10), (0, 100), max_regimes=3)
    assert regimes.create(211, ()) == (2, 3)
    assert numbers(regimes) == [1, 2, 4]
    assert regimes[0].records == 200
    assert regimes[2].records == 0


def test_otherwise_a_regime_with_few_and_old_records_is_dropped() -> None:
    """Its number is never reused, its slot is."""
    regimes = memory_of((0, 100), (1, 10), (2, 100), max_regimes=3)
    assert regimes.create(211, ()) == (1, 2)
    assert numbers(regimes) == [1, 4, 3]


def with_token(ids: list[int], seed: int) -> list[Features]:
    """A hundred records of ten tokens out of forty, all of them also with `ids`."""
    rng, featurizer = np.random.default_rng(seed), Featurizer(0)
    rows = [[1, 2, *rng.integers(100, 140, size=10), *ids, 3, 4, 5] for _ in range(100)]
    return [featurizer.featurize(np.array(row, dtype=np.int32)) for row in rows]


def test_an_absent_token_separates_regimes() -> None:
    """As in "is there" and "is there not": only the second regime has a token of its own."""
    regimes = RegimeMemory(2)
    for slot, ids in enumerate(([], [900])):
        assert regimes.create(1, ()) == (slot, None)
        fill(regimes, slot, with_token(ids, seed=slot), 1)
    absent, present = with_token([], seed=7), with_token([900], seed=8)
    classifier = RequestClassifier(regimes)
    assert np.mean([classifier.assign(each).slot == 0 for each in absent]) > 0.95
    assert np.mean([classifier.assign(each).slot == 1 for each in present]) > 0.95
    by_presence = [regimes.score(each).scores_R.argmax() == 0 for each in absent]
    assert np.mean(by_presence) < 0.9  # without eq. (4)


def test_protected_regimes_stay() -> None:
    """Even if that leaves no slot for the new one."""
    regimes = memory_of((0, 100), (1, 10), (2, 100), max_regimes=3)
    assert regimes.create(211, {0, 1, 2}) is None
    assert regimes.create(211, {1}) == (0, 1)


def test_moving_a_record_leaves_no_trace() -> None:
    """Neither in the counts of its first regime nor in its number of records; the second regime has it."""
    regimes = memory_of((0, 50), (1, 50), max_regimes=3)
    before = regimes[0].counts_B.copy()
    record = features_of(1, 1, seed=9)[0]
    regimes.add(0, record, 101)
    assert not np.array_equal(regimes[0].counts_B, before)
    regimes.move(record, 101, 0, 1)
    assert np.array_equal(regimes[0].counts_B, before)
    assert (regimes[0].records, regimes[1].records) == (50, 51)


def test_a_saved_copy_does_not_change() -> None:
    """It shares with the next copy the profiles that did not change between them."""
    regimes = memory_of((0, 50), (1, 50), max_regimes=3)
    first = regimes.save()
    counts = first[0].counts_B.copy()
    fill(regimes, 0, features_of(0, 5, seed=7), 101)
    second = regimes.save()
    assert np.array_equal(first[0].counts_B, counts)
    assert second[0].records == first[0].records + 5
    assert second[1] is first[1]
