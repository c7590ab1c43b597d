"""Fits of loss curves."""

import pytest

from benchmarks.mot.compare import fit


def test_each_law_is_recovered() -> None:
    """Its own fit is exact, and the other fit is worse."""
    t = list(range(25, 500, 25))
    exponential = fit(t, [0.3 * 0.99**step for step in t])
    assert exponential.exponential_rate == pytest.approx(0.01005, rel=1e-3)
    assert exponential.exponential_r2 == pytest.approx(1.0)
    assert exponential.power_r2 < 0.95
    power = fit(t, [0.3 / step for step in t])
    assert power.power_exponent == pytest.approx(1.0)
    assert power.power_r2 == pytest.approx(1.0)
    assert power.exponential_r2 < 0.95
    assert fit(t, [0.5] * len(t)).power_r2 == 0
