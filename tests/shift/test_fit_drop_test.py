"""The t-test on fits. `tests/contracts/test_detectors.py` holds it to its level and its delay."""

import numpy as np
import pytest
from scipy.stats import t as student

from streamlearn.shift.change_tests import FitDropTest, RunningStats


def stats_of(fits: list[float]) -> RunningStats:
    stats = RunningStats()
    for fit in fits:
        stats = stats.after(fit)
    return stats


def test_the_statistic_is_equation_1() -> None:
    """With mean, deviation and lag-1 correlation of the fits before the window."""
    rng = np.random.default_rng(0)
    before, window = rng.normal(0.2, 0.1, size=200), rng.normal(-0.1, 0.1, size=16)
    rejection = FitDropTest(1e-6, windows=(16,)).test(window.tolist(), stats_of(before.tolist()))
    assert rejection is not None
    m, s = before.mean(), before.std()
    rho = max((np.mean(before[1:] * before[:-1]) - m**2) / s**2, 0.0)
    f = (1 + rho) / (1 - rho)
    expected = (m - window.mean()) / (s * np.sqrt(f * (1 / 16 + 1 / 200)))
    assert rejection.statistic == pytest.approx(expected, rel=0.02)
    assert rejection.threshold == pytest.approx(student.isf(1e-6, 199))


def test_an_outlier_is_clipped() -> None:
    """It moves the mean by at most five deviations' worth of one record."""
    stats = stats_of([0.1, -0.1] * 50)
    assert stats.after(-100.0).mean == pytest.approx(stats.mean - 5 * stats.deviation / 101)


@pytest.mark.parametrize("at", [4, 16, 28])
def test_the_change_point_is_where_the_fits_drop(at: int) -> None:
    """Within one record."""
    fits = np.random.default_rng(1).normal(0.2, 0.05, size=132)
    fits[100 + at :] -= 0.5
    assert abs(FitDropTest.change_point(fits[100:].tolist(), stats_of(fits[:100].tolist())) - at) <= 1
