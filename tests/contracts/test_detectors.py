"""The contract of every change detector and two-sample test, and the example in its docstring."""

import doctest
import importlib
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.shift.change_tests import (
    FitDropTest,
    MeanEmbeddingTest,
    ReferenceDistribution,
    RunningStats,
    TokenPresenceTest,
)
from streamlearn.shift.drift import HISTORY, Detector, PageHinkley
from streamlearn.shift.features import NUM_FEATURES, DocumentFrequency, count_records

LEVEL = 1e-7
WINDOW = 32
PLANTED = 400

Alarms = Callable[[int, float], list[int]]
"""Seed and size, in deviations, of the shift planted at PLANTED -> the records at which an alarm is raised."""


def run(detector: Detector, values: list[float]) -> list[bool]:
    """`drift_detected` after each value."""
    detected = []
    for value in values:
        detector.update(value)
        detected.append(detector.drift_detected)
    return detected


def of_series(build: Callable[[], Detector]) -> Alarms:
    """A detector on a series of numbers, on Gaussian noise."""

    def alarms(seed: int, size: float) -> list[int]:
        return [t for t, detected in enumerate(run(build(), series(seed, size).tolist())) if detected]

    return alarms


def of_fits(seed: int, size: float) -> list[int]:
    """`FitDropTest`, which compares a window with the fits before it."""
    fits, test, before = -series(seed, size), FitDropTest(LEVEL), RunningStats()
    alarms = []
    for t in range(WINDOW, len(fits)):
        if test.test(fits[t - WINDOW : t].tolist(), before):
            alarms.append(t - 1)
        before = before.after(float(fits[t - WINDOW]))
    return alarms


def of_embeddings(seed: int, size: float) -> list[int]:
    """`MeanEmbeddingTest`, on unit vectors with one coordinate that moves."""
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


def of_tokens(seed: int, size: float) -> list[int]:
    """`TokenPresenceTest`, on records of which a share have a token that none had before."""
    rng = np.random.default_rng(seed)
    records = [rng.integers(0, 500, size=12, dtype=np.uint16) for _ in range(2 * PLANTED)]
    for i in range(PLANTED, 2 * PLANTED):
        if rng.random() < 0.4 * size:
            records[i][0] = 999
    test, before = TokenPresenceTest(LEVEL), DocumentFrequency()
    alarms = []
    for t in range(WINDOW, len(records)):
        if test.test(count_records(records[t - WINDOW : t]), WINDOW, before):
            alarms.append(t - 1)
        before = before.after(records[t - WINDOW])
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
    "mean_embedding_test": of_embeddings,
    "token_presence_test": of_tokens,
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", DETECTORS)
def test_is_silent_on_stationary_noise(name: str, seed: int) -> None:
    """No alarm in 800 values."""
    assert DETECTORS[name](seed, 0.0) == []


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", DETECTORS)
def test_detects_a_planted_shift_within_48_records(name: str, seed: int) -> None:
    """There is no alarm before it."""
    first = DETECTORS[name](seed, 2.0)[0]
    assert PLANTED <= first < PLANTED + 48


@pytest.mark.parametrize("name", SERIES)
def test_state_round_trips(name: str) -> None:
    """Restored anywhere, also after the history was cut, it raises the alarms of the original."""
    values = np.concatenate([series(0, 0.0), series(1, 0.0), series(2, 2.0)]).tolist()
    whole = SERIES[name]()
    expected = run(whole, values)
    assert any(expected)
    for cut in (0, 1, 100, 2 * HISTORY, 2 * HISTORY + 7, 1600 + PLANTED + 3):
        first = SERIES[name]()
        detected = run(first, values[:cut])
        second = SERIES[name]()
        second.load_state(plain(first.state()))
        detected += run(second, values[cut:])
        assert detected == expected
        assert same(second.state(), whole.state())


@pytest.mark.parametrize("name", DETECTORS)
def test_the_docstring_finds_a_planted_shift(name: str) -> None:
    """At the index that it states."""
    result = doctest.testmod(importlib.import_module(f"streamlearn.shift.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def plain(state: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
    """A state as it is on disk: numbers only."""
    assert all(array.dtype.kind in "if" for array in state.values())
    return {name: array.copy() for name, array in state.items()}


def same(one: Mapping[str, NDArray[np.generic]], other: Mapping[str, NDArray[np.generic]]) -> bool:
    """Whether two states are equal in every bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
