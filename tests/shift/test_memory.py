"""Naive Bayes, profiles, and the bounded memory of regimes."""

import math

import numpy as np
import pytest
import torch

from streamlearn.shift.change_tests import RecentRecord
from streamlearn.shift.features import NUM_BUCKETS, Features, Featurizer
from streamlearn.shift.memory import (
    SMOOTHING,
    AbsentTokens,
    RegimeMemory,
    bucket_log_ratios,
    log_ratios,
)
from streamlearn.shift.routing import RequestClassifier
from tests.shift.records import features_of, fill, memory_of

COUNTS = np.array([[30, 0, 10, 0], [0, 5, 1, 2]], dtype=np.float32)
TOTALS = np.array([400, 80], dtype=np.float32)


def equation_3(buckets: list[int], regime: int) -> float:
    """Eq. (3), one bucket after the other."""
    total = 0.0
    for b in buckets:
        p = sum(COUNTS[r][b] / TOTALS[r] for r in range(2)) + 1 / NUM_BUCKETS
        p /= 3
        smoothed = (COUNTS[regime][b] + SMOOTHING * p) / (TOTALS[regime] + SMOOTHING)
        total += math.log(smoothed / p)
    return total


def test_log_ratios_are_equation_3() -> None:
    """For every regime, over all buckets, including those that were never counted."""
    buckets = [0, 1, 2, 2, 3]
    expected = [equation_3(buckets, regime) for regime in range(2)]
    c_RT = COUNTS[:, buckets]
    torch.testing.assert_close(log_ratios(c_RT, TOTALS).tolist(), expected, rtol=1e-4, atol=1e-4)
    sums = [float(bucket_log_ratios(c_RT, TOTALS, regime).sum()) for regime in range(2)]
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)


def test_absent_tokens_are_equation_5() -> None:
    """Only tokens that are common in some regime count, and their sum is bounded."""
    frequency_RB = np.array([[0.9, 0.1, 0.5, 0.99], [0.2, 0.7, 0.3, 0.99]], dtype=np.float32)
    absent = AbsentTokens(frequency_RB)
    # Bucket 2 is in C of neither regime; 0 and 3 are present, 0 twice.
    scores = absent.scores(np.array([0, 3, 0], dtype=np.uint16))
    torch.testing.assert_close(scores.tolist(), [math.log(0.9), math.log(0.3)], rtol=1e-4, atol=1e-4)
    scores = absent.scores(np.array([2], dtype=np.uint16))
    second = math.log(0.8) + math.log(0.3) + math.log(0.01)
    torch.testing.assert_close(scores.tolist(), [max(math.log(0.1 * 0.9 * 0.01), -8.0), second], rtol=1e-4, atol=1e-4)
    nothing = np.array([], dtype=np.uint16)
    assert absent.scores(nothing)[0] > -8.0
    assert AbsentTokens(frequency_RB.repeat(3, axis=1)).scores(nothing).tolist() == [-8.0, -8.0]


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
    assert np.mean(by_presence) < 0.9  # without eq. (5)


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
    regimes.move(RecentRecord(record, 101, 0, 0.0), 1)
    assert np.array_equal(regimes[0].counts_B, before)
    assert (regimes[0].records, regimes[1].records) == (50, 51)


@pytest.fixture(scope="module")
def vacated() -> RegimeMemory:
    """Of tasks 0, 1 and 2, the second forgotten."""
    regimes = memory_of((0, 100), (1, 60), (2, 100), max_regimes=4)
    regimes.forget(1)
    regimes.calibrate()
    return regimes


def test_no_record_is_assigned_to_a_vacant_slot(vacated: RegimeMemory) -> None:
    """The others score it, and single inputs, as a memory that never had that regime."""
    without = RegimeMemory(4, memory_of((0, 100), max_regimes=4).profiles, next_number=3)
    assert without.create(161, ()) == (1, None)
    fill(without, 1, features_of(2, 100, seed=2), 161)
    without.calibrate()
    classifiers = RequestClassifier(vacated), RequestClassifier(without)
    for record in [each for task in range(4) for each in features_of(task, 20, seed=5)]:
        scores, expected = vacated.score(record).scores_R, without.score(record).scores_R
        assert scores[[0, 2]].tolist() == expected.tolist()
        assert scores[1] == -np.inf
        assigned = [classifier.assign(record) for classifier in classifiers]
        assert assigned[0] == assigned[1]._replace(slot=2 * assigned[1].slot)
    assert vacated.rank(features_of(1, 5)) == [2 * slot for slot in without.rank(features_of(1, 5))]
    assert vacated[2].fit_center == without[1].fit_center


def test_the_lowest_vacant_slot_is_taken_first() -> None:
    """Then the next unused one, and only then another regime's. Numbers go on."""
    regimes = memory_of((0, 50), (1, 50), (2, 50), max_regimes=4)
    regimes.forget(2)
    regimes.forget(0)
    slots = []
    for ordinal in (151, 201, 251):
        created = regimes.create(ordinal, ())
        assert created is not None
        assert created[1] is None
        slots.append(created[0])
        fill(regimes, slots[-1], features_of(3, 50), ordinal)
    assert slots == [0, 2, 3]
    assert numbers(regimes) == [4, 2, 5, 6]
    assert regimes[0].records == 50
    created = regimes.create(301, ())
    assert created is not None
    assert created[1] is not None
