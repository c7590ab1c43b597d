"""Requests go to the likeliest regime, and the p-value of eq. (5) tells whether it explains them."""

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.shift.features import NUM_FEATURES
from streamlearn.shift.memory import RegimeMemory
from streamlearn.shift.routing import (
    MIN_EXEMPLARS,
    InputDensity,
    NoveltyTest,
    RequestClassifier,
    Standardizer,
    leave_one_out,
)
from tests.shift.records import features_of, memory_of, recent
from tests.variants import variants

LEVEL = 0.01


def calibrated(values_NS: NDArray[np.float64]) -> NoveltyTest:
    """The test of one regime with these exemplars."""
    statistics = [leave_one_out(values_NS, index) for index in range(len(values_NS))]
    return NoveltyTest([Standardizer.from_samples(values_NS)], np.sort(statistics))


@pytest.mark.parametrize("number", variants([16, 64, 512], short=["16", "64"]))
def test_few_records_of_the_regime_are_rejected(number: int) -> None:
    """About the level, however many exemplars there are; records of another origin are."""
    rng = np.random.default_rng(number)
    scale = np.array([0.2, 0.1, 0.05])
    rejected = []
    for _ in range(200):
        test = calibrated(rng.normal(0.5, scale, (number, 3)))
        rejected.append(np.mean([test.p_value(0, each) < LEVEL for each in rng.normal(0.5, scale, (50, 3))]))
        assert test.p_value(0, np.array([2.5, 1.5, 1.0])) < LEVEL
    assert 0.2 * LEVEL < np.mean(rejected) < 1.5 * LEVEL


def test_the_p_value_falls_with_the_statistic() -> None:
    """From 1 by ranks, and in the tail by eq. (5)."""
    test = NoveltyTest([], np.arange(25.0))
    assert test.tail(-1.0) == 1.0
    assert test.tail(19.0) == pytest.approx(6 / 25)  # itself and the k = 5 above
    assert test.tail(19.0 + 1e-9) == pytest.approx(5 / 25)
    values = [test.tail(statistic) for statistic in np.arange(0.0, 200.0)]
    assert (np.diff(values) < 0).all()
    assert test.tail(24.0) == pytest.approx(5 / 25 * (1 + 5 / (5 * 3)) ** -5)  # eq. (5): mean excess 3


def test_a_regime_with_few_exemplars_explains_what_it_is_given() -> None:
    """Nothing is known to compare with."""
    values = np.full(3, 1e6)
    assert NoveltyTest([None], np.arange(100.0)).p_value(0, values) == 1.0
    few = np.random.default_rng(0).normal(size=(MIN_EXEMPLARS - 1, 3))
    assert calibrated(few).p_value(0, values) == 1.0


def test_exemplars_that_are_all_equal_leave_a_scale() -> None:
    """The prior deviations and the minimum excess; otherwise the next record would be infinitely far away."""
    test = calibrated(np.full((16, 3), 0.5))
    assert test.p_value(0, np.full(3, 0.5)) == 1.0
    assert test.p_value(0, np.array([0.501, 0.5, 0.5])) > LEVEL
    assert test.p_value(0, np.array([1.5, 0.5, 0.5])) < LEVEL


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
            result = [classifier.assign(each) for each in features_of(task, 100, seed=77 + seed)]
            assert np.mean([each.slot == task for each in result]) > 0.97
            rejected += [each.p_value < LEVEL for each in result]
    assert np.mean(rejected) < 2 * LEVEL


def test_one_regime_is_enough_to_tell(regimes: RegimeMemory) -> None:
    """There is nothing to compare it with but its own records."""
    classifier = RequestClassifier(memory_of((0, 120), max_regimes=2))
    known = [classifier.assign(each).p_value < LEVEL for each in features_of(0, 100, seed=77)]
    unknown = [classifier.assign(each).p_value < LEVEL for each in features_of(3, 100, seed=77)]
    assert np.mean(known) < 5 * LEVEL
    assert np.mean(unknown) > 0.9


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


def test_the_density_is_that_of_the_equation() -> None:
    """Eq. (6), with recent records, and with a record left out of its own regime."""
    regimes = memory_of((0, 40), (1, 30), max_regimes=3)
    regimes.whiten()
    newest = recent(features_of(1, 5, seed=3), 1, start=71, regimes=regimes)
    own_ND = [[each.x_D for each in features_of(0, 40)], [each.x_D for each in features_of(1, 30, seed=1)]]
    distances = sum(regimes.reference(slot).spread * (len(own_ND[slot]) - 1) for slot in (0, 1))
    spread = (distances + 1) / (39 + 29 + 1)
    own_ND[1] += [record.features.x_D for record in newest]
    density, x_D = InputDensity(regimes, newest), newest[0].features.x_D

    def expected(records_ND: list[NDArray[np.float32]]) -> float:
        difference_D = x_D - np.mean(records_ND, axis=0, dtype=np.float64)
        scale = (1 + 1 / len(records_ND)) * spread
        return float(
            -difference_D @ regimes.metric @ difference_D * NUM_FEATURES / (2 * scale)
            - NUM_FEATURES / 2 * np.log(scale / spread)
        )

    np.testing.assert_allclose(density.scores(x_D), [expected(own_ND[0]), expected(own_ND[1])], rtol=1e-4)
    without = [each for each in own_ND[1] if each is not x_D]
    np.testing.assert_allclose(density.scores(x_D, own=1), [expected(own_ND[0]), expected(without)], rtol=1e-4)


def test_a_regime_that_was_split_has_the_mean_of_its_sample() -> None:
    """Its sums began again without them."""
    regimes = memory_of((0, 20), (1, 20), max_regimes=3)
    assert regimes.create(41, ()) == (2, None)
    regimes.divide(1, 2, moved=range(31, 41), ordinal=41)
    assert regimes[1].reference.num_records == regimes[2].reference.num_records == 0
    density = InputDensity(regimes, ())
    scores_NR = np.array([density.scores(record.x_D) for record in features_of(1, 20, seed=9)])
    assert (scores_NR[:, 1:] > scores_NR[:, :1]).all()
