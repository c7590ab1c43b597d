"""What every detector promises, asked of each; and the example in each one's docstring."""

import doctest
import importlib
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.shift.detector import HISTORY, Detector
from streamlearn.shift.document_frequency import DocumentFrequency, window_counts
from streamlearn.shift.featurizer import NUM_FEATURES
from streamlearn.shift.fit_drop_test import FitDropTest, RunningStats
from streamlearn.shift.mean_embedding_test import MeanEmbeddingTest
from streamlearn.shift.page_hinkley import PageHinkley
from streamlearn.shift.reference_distribution import ReferenceDistribution
from streamlearn.shift.token_presence_test import TokenPresenceTest

LEVEL = 1e-7
WINDOW = 32
PLANTED = 400

Alarms = Callable[[int, float], list[int]]
"""Seed and size of the shift planted at PLANTED, in deviations, to the records at which the detector rings."""


def of_series(build: Callable[[], Detector]) -> Alarms:
    """A detector of numbers, on Gaussian noise."""

    def alarms(seed: int, size: float) -> list[int]:
        detector = build()
        return [t for t, value in enumerate(series(seed, size).tolist()) if detector.update(value)]

    return alarms


def of_fits(seed: int, size: float) -> list[int]:
    """`FitDropTest`, which sees a window and what came before it."""
    fits, test, running = -series(seed, size), FitDropTest(LEVEL), RunningStats()
    alarms = []
    for t in range(WINDOW, len(fits)):
        if test.test(fits[t - WINDOW : t].tolist(), running):
            alarms.append(t - 1)
        running = running.after(float(fits[t - WINDOW]))
    return alarms


def of_signatures(seed: int, size: float) -> list[int]:
    """`MeanEmbeddingTest`, on unit vectors of which one coordinate moves."""
    rng = np.random.default_rng(seed)
    phi = rng.normal(size=(2 * PLANTED, NUM_FEATURES)).astype(np.float32)
    phi[PLANTED:, 0] += 4 * size
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    test, reference = MeanEmbeddingTest(LEVEL), ReferenceDistribution()
    alarms = []
    for t in range(WINDOW, len(phi)):
        if test.test(phi[t - WINDOW : t], reference):
            alarms.append(t - 1)
        reference.add(phi[t - WINDOW], phi[t - WINDOW + 1 : t])
    return alarms


def of_words(seed: int, size: float) -> list[int]:
    """`TokenPresenceTest`, on records of which more and more have one word that none had."""
    rng = np.random.default_rng(seed)
    records = [rng.integers(0, 500, size=12, dtype=np.uint16) for _ in range(2 * PLANTED)]
    for i in range(PLANTED, 2 * PLANTED):
        if rng.random() < 0.4 * size:
            records[i][0] = 999
    test, shares = TokenPresenceTest(LEVEL), DocumentFrequency()
    alarms = []
    for t in range(WINDOW, len(records)):
        if test.test(window_counts(records[t - WINDOW : t]), WINDOW, shares):
            alarms.append(t - 1)
        shares = shares.after(records[t - WINDOW])
    return alarms


def series(seed: int, size: float) -> NDArray[np.float64]:
    """Noise of deviation 1 that rises by `size`."""
    noise = np.random.default_rng(seed).normal(size=2 * PLANTED)
    noise[PLANTED:] += size
    return noise


SERIES: dict[str, Callable[[], Detector]] = {"page_hinkley": PageHinkley}
DETECTORS: dict[str, Alarms] = {
    **{name: of_series(build) for name, build in SERIES.items()},
    "fit_drop_test": of_fits,
    "mean_embedding_test": of_signatures,
    "token_presence_test": of_words,
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", DETECTORS)
def test_is_silent_on_stationary_noise(name: str, seed: int) -> None:
    """No alarm in 800 values."""
    assert DETECTORS[name](seed, 0.0) == []


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", DETECTORS)
def test_rings_within_48_of_a_planted_shift(name: str, seed: int) -> None:
    """And not before it."""
    first = DETECTORS[name](seed, 2.0)[0]
    assert PLANTED <= first < PLANTED + 48


@pytest.mark.parametrize("name", SERIES)
def test_state_round_trips(name: str) -> None:
    """Restored anywhere, also behind the point where the history is cut, it rings where the original does."""
    values = np.concatenate([series(0, 0.0), series(1, 0.0), series(2, 2.0)]).tolist()
    whole = SERIES[name]()
    expected = [whole.update(value) for value in values]
    assert any(expected)
    for cut in (0, 1, 100, 2 * HISTORY, 2 * HISTORY + 7, 1600 + PLANTED + 3):
        first = SERIES[name]()
        rung = [first.update(value) for value in values[:cut]]
        second = SERIES[name]()
        second.load_state(plain(first.state()))
        rung += [second.update(value) for value in values[cut:]]
        assert rung == expected
        assert same(second.state(), whole.state())


@pytest.mark.parametrize("name", DETECTORS)
def test_the_docstring_finds_a_planted_shift(name: str) -> None:
    """At the index that it states."""
    result = doctest.testmod(importlib.import_module(f"streamlearn.shift.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def plain(state: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
    """What is left of a state on disk: numbers."""
    assert all(array.dtype.kind in "if" for array in state.values())
    return {name: array.copy() for name, array in state.items()}


def same(one: Mapping[str, NDArray[np.generic]], other: Mapping[str, NDArray[np.generic]]) -> bool:
    """Whether two states are equal in every bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
