"""The contract of every change detector and two-sample test, and the example in its docstring."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.codec import from_arrays, to_arrays
from streamlearn.shift.change_tests import WINDOW_TESTS, RecentRecord, Window, WindowTest
from streamlearn.shift.detector import WHITENED_EVERY
from streamlearn.shift.drift import PageHinkley
from streamlearn.shift.features import NUM_FEATURES, Features
from streamlearn.shift.reference import IDENTITY, Reference, ReferenceDistribution, pooled_metric

LEVEL = 1e-7
WINDOW = 32
PLANTED = 400


def series(seed: int, size: float) -> NDArray[np.float64]:
    """Noise of deviation 1 that rises by `size`."""
    noise = np.random.default_rng(seed).normal(size=2 * PLANTED)
    noise[PLANTED:] += size
    return noise


def records(seed: int, size: float) -> list[RecentRecord]:
    """Records whose embeddings move, whose fits drop, and a share of which have a token that none had before."""
    rng = np.random.default_rng(seed)
    x_ND = rng.normal(size=(2 * PLANTED, NUM_FEATURES)).astype(np.float32)
    x_ND[PLANTED:, 0] += 4 * size
    x_ND /= np.linalg.norm(x_ND, axis=1, keepdims=True)
    buckets = [rng.integers(0, 500, size=12, dtype=np.uint16) for _ in range(2 * PLANTED)]
    for i in range(PLANTED, 2 * PLANTED):
        if rng.random() < 0.4 * size:
            buckets[i][0] = 999
    columns = zip(x_ND, buckets, (-12 * series(seed, size)).tolist(), strict=True)
    return [RecentRecord(Features(x_D, ids, 0.0), i, 0, fit) for i, (x_D, ids, fit) in enumerate(columns)]


def alarms_of(test: WindowTest, seed: int, size: float) -> list[int]:
    """The records at which the test alarms."""
    added, window, alarms = records(seed, size), Window(), []
    distribution, metric = ReferenceDistribution(), IDENTITY
    for t in range(WINDOW, len(added)):
        window = Window(tuple(added[t - WINDOW : t]), window.fits_before, window.tokens_before)
        if t % WHITENED_EVERY == 0:
            metric = pooled_metric([distribution])
        if test(window, Reference(distribution, metric), LEVEL):
            alarms.append(t - 1)
        oldest = window.records[0]
        distribution = distribution.after(oldest.features.x_D, metric)
        before = window.fits_before.after(oldest.fit), window.tokens_before.after(oldest.features.buckets)
        window = Window((), *before)
    return alarms


def rises_of(seed: int, size: float) -> list[int]:
    """The values at which Page-Hinkley declares a rise."""
    detector = PageHinkley()
    return [t for t, value in enumerate(series(seed, size).tolist()) if detector.update(value)]


def name_of(test: WindowTest) -> str:
    return f"{test.func.__name__}_{test.keywords['n']}" if isinstance(test, partial) else test.__name__


DETECTORS: dict[str, Callable[[int, float], list[int]]] = {
    "page_hinkley": rises_of,
    **{name_of(test): partial(alarms_of, test) for test in WINDOW_TESTS},
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", DETECTORS)
def test_is_silent_on_stationary_noise(name: str, seed: int) -> None:
    """No alarm in 800 values."""
    assert DETECTORS[name](seed, 0.0) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", DETECTORS)
def test_detects_a_planted_shift_within_48_records(name: str, seed: int) -> None:
    """There is no alarm before it."""
    first = DETECTORS[name](seed, 2.0)[0]
    assert PLANTED <= first < PLANTED + 48


def test_a_restored_detector_raises_the_alarms_of_the_original() -> None:
    """Restored anywhere, with its state in a file."""
    values = np.concatenate([series(0, 0.0), series(1, 0.0), series(2, 2.0)]).tolist()
    whole = PageHinkley()
    expected = [whole.update(value) for value in values]
    assert any(expected)
    for cut in (0, 1, 100, 1024, 1600 + PLANTED + 3):
        first = PageHinkley()
        detected = [first.update(value) for value in values[:cut]]
        second = from_arrays(PageHinkley, to_arrays(first))
        detected += [second.update(value) for value in values[cut:]]
        assert detected == expected
        assert second == whole
