"""The running sums give the moments of the records they were computed from."""

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.shift.change_tests import HALVED_AT, ReferenceDistribution
from streamlearn.shift.features import NUM_FEATURES


def unit_vectors(number: int, *, repeated: int = 1, seed: int = 0) -> NDArray[np.float32]:
    """Random directions, each `repeated` times in a row."""
    phi = np.random.default_rng(seed).normal(size=(number, NUM_FEATURES)).astype(np.float32)
    phi[:, 0] += 10.0
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    return phi.repeat(repeated, axis=0)


def test_mean_and_spread_are_equation_1() -> None:
    """Spread is the trace of the unbiased covariance."""
    phi = unit_vectors(200)
    reference = ReferenceDistribution()
    reference.add_all(phi)
    np.testing.assert_allclose(reference.mean, phi.mean(axis=0), atol=1e-6)
    assert reference.spread == pytest.approx(np.trace(np.cov(phi.T)), rel=1e-4)


def test_inflation_is_equation_3() -> None:
    """Independent records have f_n near 1; records in bursts of four have the variance of n / 4 independent ones."""
    independent, bursts = ReferenceDistribution(), ReferenceDistribution()
    independent.add_all(unit_vectors(2000))
    bursts.add_all(unit_vectors(2000, repeated=4))
    assert independent.inflation(16) == pytest.approx(1.0, abs=0.1)
    k = np.arange(1, 4)
    expected = 1 + 2 * np.sum((1 - k / 16) * (1 - k / 4))
    assert bursts.inflation(16) == pytest.approx(expected, rel=0.05)


def test_freedom_is_the_effective_number_of_dimensions() -> None:
    """For an isotropic distribution, about all of them."""
    reference = ReferenceDistribution()
    reference.add_all(unit_vectors(2000))
    assert 0.8 * NUM_FEATURES < reference.freedom < NUM_FEATURES


def test_merging_adds_the_records_and_a_row_holds_all() -> None:
    """The row is what a snapshot keeps."""
    one, other = ReferenceDistribution(), ReferenceDistribution()
    one.add_all(unit_vectors(50, seed=1))
    other.add_all(unit_vectors(30, seed=2))
    merged = one.copy()
    merged.merge(other)
    assert (one.num_records, merged.num_records) == (50, 80)
    assert np.array_equal(merged.sum_D, one.sum_D + other.sum_D)
    assert len(merged.to_row()) == ReferenceDistribution.ROW
    assert np.array_equal(ReferenceDistribution.from_row(merged.to_row()).to_row(), merged.to_row())


def test_old_records_fade() -> None:
    """At the bound the sums are halved; the mean stays."""
    reference = ReferenceDistribution()
    reference.add_all(unit_vectors(10))
    reference.num_records = HALVED_AT - 1.0
    sums = reference.sum_D.copy()
    phi_D = unit_vectors(1, seed=3)[0]
    reference.add(phi_D, np.zeros((0, NUM_FEATURES), dtype=np.float32))
    assert reference.num_records == HALVED_AT / 2
    assert np.array_equal(reference.sum_D, (sums + phi_D) / 2)
