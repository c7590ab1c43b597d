"""The two-sample test on mean embeddings. `tests/contracts/test_detectors.py` holds it to its level and its delay."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import gamma

from streamlearn.shift.change_tests import LOWEST_THRESHOLD, MeanEmbeddingTest, ReferenceDistribution
from streamlearn.shift.features import NUM_FEATURES


def planted(number: int, at: int, size: float = 8.0) -> NDArray[np.float32]:
    """Unit vectors, one coordinate of which moves at record `at`."""
    phi = np.random.default_rng(0).normal(size=(number, NUM_FEATURES)).astype(np.float32)
    phi[at:, 0] += size
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    return phi


def reference_of(phi_ND: NDArray[np.float32]) -> ReferenceDistribution:
    reference = ReferenceDistribution()
    reference.add_all(phi_ND)
    return reference


def test_the_statistic_is_equation_1() -> None:
    """The older part of the window counts to the regime before it."""
    phi = planted(132, at=116, size=4.0)
    reference, test = reference_of(phi[:100]), MeanEmbeddingTest(level=1e-3, windows=(16,))
    rejection = test.test(phi[100:], reference)
    assert rejection is not None
    difference = phi[116:].mean(axis=0) - phi[:116].mean(axis=0)
    chance = reference.spread * reference.inflation(16) * (1 / 16 + 1 / 116)
    assert rejection.statistic == pytest.approx(float(difference @ difference) / chance, rel=1e-4)
    assert rejection.window == 16


@pytest.mark.parametrize("level", [1e-3, 1e-7])
def test_the_threshold_is_equation_2(level: float) -> None:
    """The quantile of the Gamma distribution, and never below `LOWEST_THRESHOLD` at a useful level."""
    reference, test = reference_of(planted(100, at=100)), MeanEmbeddingTest(level)
    nu = reference.freedom
    assert test.threshold(reference) == pytest.approx(gamma.isf(level, nu / 2, scale=2 / nu))
    assert MeanEmbeddingTest(1e-7).threshold(reference) > LOWEST_THRESHOLD


@pytest.mark.parametrize("at", [4, 16, 28])
def test_the_change_point_is_where_the_distribution_moves(at: int) -> None:
    """Within one record."""
    phi = planted(132, at=100 + at)
    assert abs(MeanEmbeddingTest.change_point(phi[100:], reference_of(phi[:100])) - at) <= 1
