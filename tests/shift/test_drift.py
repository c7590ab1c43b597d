"""Changes of the answers are detected from the loss, relative to the regime's own level."""

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.codec import from_arrays, to_arrays
from streamlearn.settings import ShiftSettings
from streamlearn.shift.drift import ConceptDriftDetector, LossLevels

SETTINGS = ShiftSettings()
JUMP = 800


def losses(seed: int, *, jump: float = 0.0, records: int = 1500) -> NDArray[np.float64]:
    """A loss that falls from 4 to 1 with heavy-tailed noise; a `jump` raises it once, and is learned again."""
    rng = np.random.default_rng(seed)
    t = np.arange(records)
    mean = 1.0 + 3.0 * np.exp(-t / 120)
    mean += jump * np.exp(-np.maximum(t - JUMP, 0) / 300) * (t >= JUMP)
    noisy: NDArray[np.float64] = mean * rng.gamma(2.0, 0.5, size=records)
    return noisy


@pytest.mark.parametrize("seed", range(5))
def test_learning_is_no_shift(seed: int) -> None:
    """Neither the fall of the loss nor its noise raises an alarm."""
    assert not ConceptDriftDetector(SETTINGS).update(0, 1, 1, losses(seed).tolist())


@pytest.mark.parametrize("seed", range(5))
def test_other_answers_are_a_shift_of_the_same_regime(seed: int) -> None:
    """A loss that more than doubles is detected within 200 records."""
    shifts = ConceptDriftDetector(SETTINGS).update(3, 7, 1, losses(seed, jump=1.5).tolist())
    assert [(shift.kind, shift.slot, shift.regime, shift.known) for shift in shifts] == [("answers", 3, 7, True)]
    assert JUMP < shifts[0].declared_at <= JUMP + 200


def test_each_regime_has_its_own_level() -> None:
    """A regime with a high loss interleaved with one with a low loss is a rise of neither."""
    detector = ConceptDriftDetector(SETTINGS)
    low, high = losses(0), losses(1) * 5
    for i in range(len(low)):
        assert not detector.update(0, 1, 2 * i + 1, [low[i]])
        assert not detector.update(1, 2, 2 * i + 2, [high[i]])


def test_a_reused_slot_starts_afresh() -> None:
    """The losses of the previous regime do not affect the new one."""
    detector = ConceptDriftDetector(SETTINGS)
    detector.update(0, 1, 1, (losses(0) * 0.1).tolist())
    detector.forget(0)
    assert not detector.update(0, 2, 2000, losses(1).tolist())


def test_a_restored_detector_repeats_itself() -> None:
    """Stopped anywhere, it declares the same shifts and ends in the same state."""
    series = losses(0, jump=1.5)
    whole = ConceptDriftDetector(SETTINGS)
    expected = whole.update(0, 1, 1, series.tolist())
    for cut in (1, 20, 500, JUMP + 10, 1300):
        first = ConceptDriftDetector(SETTINGS)
        shifts = first.update(0, 1, 1, series[:cut].tolist())
        second = ConceptDriftDetector(SETTINGS)
        second.state = from_arrays(LossLevels, to_arrays(first.state))
        shifts += second.update(0, 1, cut + 1, series[cut:].tolist())
        assert shifts == expected
        assert second.state == whole.state


def test_a_loss_that_is_not_finite_is_ignored() -> None:
    """A refused step carries no information about the answers."""
    detector = ConceptDriftDetector(SETTINGS)
    assert not detector.update(0, 1, 1, [float("nan"), float("inf")] * 200)
