"""The p-value of eq. (5), and what it is calibrated on."""

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.shift.routing import MIN_EXEMPLARS, NoveltyTest, Standard, leave_one_out
from tests.variants import variants

LEVEL = 0.01


def calibrated(values_NS: NDArray[np.float64]) -> NoveltyTest:
    """The test of one regime with these exemplars."""
    statistics = [leave_one_out(values_NS, index) for index in range(len(values_NS))]
    return NoveltyTest.calibrated([Standard.of(values_NS)], statistics)


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
    test = NoveltyTest.calibrated([], np.arange(25.0))
    assert test.tail(-1.0) == 1.0
    assert test.tail(19.0) == pytest.approx(6 / 25)  # itself and the k = 5 above
    assert test.tail(19.0 + 1e-9) == pytest.approx(5 / 25)
    values = [test.tail(statistic) for statistic in np.arange(0.0, 200.0)]
    assert (np.diff(values) < 0).all()
    assert test.tail(24.0) == pytest.approx(5 / 25 * (1 + 5 / (5 * 3)) ** -5)  # eq. (5): mean excess 3


def test_a_regime_with_few_exemplars_explains_what_it_is_given() -> None:
    """Nothing is known to compare with."""
    values = np.full(3, 1e6)
    assert NoveltyTest.calibrated([None], np.arange(100.0)).p_value(0, values) == 1.0
    few = np.random.default_rng(0).normal(size=(MIN_EXEMPLARS - 1, 3))
    assert calibrated(few).p_value(0, values) == 1.0


def test_exemplars_that_are_all_equal_leave_a_scale() -> None:
    """The prior deviations and the minimum excess; otherwise the next record would be infinitely far away."""
    test = calibrated(np.full((16, 3), 0.5))
    assert test.p_value(0, np.full(3, 0.5)) == 1.0
    assert test.p_value(0, np.array([0.501, 0.5, 0.5])) > LEVEL
    assert test.p_value(0, np.array([1.5, 0.5, 0.5])) < LEVEL
