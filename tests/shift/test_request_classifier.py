"""Single inputs of known regimes are explained by them, others are not."""

import numpy as np
import pytest

from streamlearn.shift.memory import RegimeMemory
from streamlearn.shift.routing import MIN_EXEMPLARS, RequestClassifier
from tests.shift.records import features_of, memory_of, recent

LEVEL = 0.01


@pytest.fixture(scope="module")
def regimes() -> RegimeMemory:
    """Of tasks 0, 1 and 2."""
    return memory_of((0, 120), (1, 120), (2, 120), max_regimes=4)


def test_records_of_known_regimes_are_explained() -> None:
    """By their own regime; about the level of them are not. A sample calibrates it, so the share varies by memory."""
    rejected = []
    for seed in range(8):
        regimes = memory_of((0, 120), (1, 120), (2, 120), max_regimes=4, seed=seed)
        classifier = RequestClassifier(regimes)
        for task in range(3):
            found = [classifier.assign(each) for each in features_of(task, 100, seed=77 + seed)]
            assert np.mean([each.slot == task for each in found]) > 0.97
            rejected += [each.p_value < LEVEL for each in found]
    assert np.mean(rejected) < 2 * LEVEL


def test_records_of_another_task_are_not_explained(regimes: RegimeMemory) -> None:
    """By any regime."""
    classifier = RequestClassifier(regimes)
    found = [classifier.assign(each) for each in features_of(3, 100, seed=77)]
    assert np.mean([each.p_value < LEVEL for each in found]) > 0.95


def test_one_regime_is_enough_to_tell(regimes: RegimeMemory) -> None:
    """There is nothing to compare it with but its own records."""
    classifier = RequestClassifier(memory_of((0, 120), max_regimes=2))
    known = [classifier.assign(each).p_value < LEVEL for each in features_of(0, 100, seed=77)]
    unknown = [classifier.assign(each).p_value < LEVEL for each in features_of(3, 100, seed=77)]
    assert np.mean(known) < 5 * LEVEL
    assert np.mean(unknown) > 0.9


def test_a_young_regime_explains_what_is_assigned_to_it() -> None:
    """It has too few exemplars; the older one is tested all the same."""
    young = MIN_EXEMPLARS - 1
    classifier = RequestClassifier(memory_of((0, 120), (1, young), max_regimes=2))
    found = [classifier.assign(each) for each in features_of(1, 50, seed=77)]
    assert {each.p_value for each in found if each.slot == 1} == {1.0}
    assert sum(each.slot == 1 for each in found) > 25


def test_the_memory_is_not_changed(regimes: RegimeMemory) -> None:
    """Calibration takes exemplars out of counts that the detector goes on with."""
    before = [regimes[slot].counts_B.copy() for slot in range(3)]
    scores = regimes.score(features_of(0, 1, seed=5)[0])
    classifier = RequestClassifier(regimes)
    classifier.assign(features_of(0, 1, seed=5)[0])
    assert all(np.array_equal(regimes[slot].counts_B, before[slot]) for slot in range(3))
    assert np.array_equal(regimes.score(features_of(0, 1, seed=5)[0]).scores_R, scores.scores_R)


def test_records_that_are_not_settled_count_as_exemplars() -> None:
    """A regime of six recent records is tested, so it does not explain another task's requests."""
    regimes = memory_of((0, 120), max_regimes=2)
    assert regimes.create(121, ()) == (1, None)
    newest = recent(features_of(1, 6), 1, start=121, regimes=regimes)
    requests = features_of(3, 50, seed=77)
    classifiers = (RequestClassifier(regimes, newest), RequestClassifier(regimes))
    tested, untested = ([each.assign(request) for request in requests] for each in classifiers)
    assert {each.p_value for each in untested if each.slot == 1} == {1.0}
    unknown = [each.p_value < LEVEL for each in tested if each.slot == 1]
    assert len(unknown) > 10
    assert np.mean(unknown) > 0.5
