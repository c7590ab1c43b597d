"""What answers the unknown: the lowest of the losses on the first records of new regimes."""

import math
from typing import Any

import pytest

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.regimes.start import MAX_REGIMES, Fallback, HeadStart


def fallback(setting: Any = "auto", *, has_regimes: bool = True) -> Fallback:
    return Fallback(setting, has_regimes=has_regimes)


def found(backbone: float, mean: float | None, *others: float) -> HeadStart:
    """Of a new regime; the likeliest known one has the first of the other losses."""
    return HeadStart(backbone, dict(enumerate(others, start=5)), mean, 100)


def test_a_loss_that_is_not_finite_decides_nothing() -> None:
    """Neither what answers the unknown nor what a regime starts from."""
    made = fallback()
    made.add(found(2.0, math.nan, 3.0))
    assert (made.status.regimes, made.to_json()) == (0, [])
    assert found(2.0, None, math.nan, 1.5).slot == 6
    assert found(2.0, None, math.nan).slot is None
    assert found(math.nan, None, 1.0).slot is None


def test_the_losses_are_means_over_new_regimes() -> None:
    """The likeliest regime is the nearest, not the one with the lowest loss; the lowest of the three means decides."""
    made = fallback()
    made.add(found(2.0, 1.5, 3.0, 0.5))
    made.add(found(3.0, 2.5, 1.5, 0.5))
    status = made.status
    assert status.losses == {"mean": 2.0, "nearest": 2.25, "backbone": 2.5}
    assert (status.answered_by, status.regimes, status.setting) == ("mean", 2, "auto")


@pytest.mark.parametrize(
    ("losses", "winner"),
    [
        ((2.0, 1.0, 3.0), "mean"),
        ((2.0, 2.5, 1.0), "nearest"),
        ((2.0, 2.5, 3.0), "backbone"),
        ((2.0, 2.0, 2.0), "backbone"),
    ],
)
def test_any_may_win(losses: tuple[float, float, float], winner: str) -> None:
    """A tie leaves the backbone untouched."""
    made = fallback()
    made.add(found(*losses))
    assert made.answered_by == winner


def test_only_the_newest_regimes_count() -> None:
    """The alternatives of long ago knew less."""
    made = fallback()
    for _ in range(3):
        made.add(found(9.0, 9.0, 0.0))
    for _ in range(MAX_REGIMES):
        made.add(found(1.0, 2.0, 3.0))
    assert made.status.losses == {"mean": 2.0, "nearest": 3.0, "backbone": 1.0}
    assert made.status.regimes == MAX_REGIMES


def test_shared_experts_have_no_mean() -> None:
    """There is one adapter, with a bias for each regime."""
    made = fallback()
    made.add(found(2.0, None, 1.0))
    assert made.status.losses == {"mean": None, "nearest": 1.0, "backbone": 2.0}
    assert made.answered_by == "nearest"


def test_without_a_measurement_the_backbone_answers() -> None:
    """As while one regime is remembered, and for one that took its slot."""
    made = fallback()
    made.add(found(2.0, None))
    assert made.status == fallback().status
    assert (made.status.nearest_loss, made.answered_by) == (None, "backbone")


@pytest.mark.parametrize(("setting", "slot"), [("mean", (2, 1, 0)), ("nearest", 1), ("backbone", NO_REGIME)])
def test_a_setting_is_obeyed_whatever_was_measured(setting: Any, slot: Slot) -> None:
    made = fallback(setting)
    made.add(found(*{"mean": (1.0, 2.0, 1.0), "nearest": (1.0, 1.0, 2.0), "backbone": (2.0, 1.0, 1.0)}[setting]))
    assert made.answered_by == setting
    assert made.slot_for(1, (2, 1, 0)) == slot


def test_where_routing_has_no_regimes_the_adapter_answers() -> None:
    """Only the setting chooses the backbone."""
    assert fallback(has_regimes=False).answered_by == "nearest"
    assert fallback("backbone", has_regimes=False).answered_by == "backbone"


def test_the_losses_survive_json() -> None:
    """As the manifest keeps them."""
    one, other = fallback(), fallback()
    one.add(found(2.0, 1.5, 3.0))
    one.add(found(2.5, 1.0, 2.0))
    other.load_json(one.to_json())
    assert other.status == one.status
