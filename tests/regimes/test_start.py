"""How a new regime gets its adapter, and what answers requests that match no regime."""

import math
from typing import Any

import pytest
import torch

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.adapters.presets import regime_adapter
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import Fallback, HeadStart, measure_head_start
from tests.doubles import random_examples
from tests.learners import MakeLearner, make_learner, tiny

__all__ = ["make_learner", "tiny"]  # fixtures


RECORDS = random_examples([12, 9, 14], prompt_length=4, seed=5)


@pytest.fixture
def learner(make_learner: MakeLearner) -> Learner:
    """Regime 1 was trained on the records, regime 0 on others, regime 2 on nothing."""
    made = make_learner(preset="streamlearn")
    for seed in range(6):
        made.step(RECORDS, [1] * 3)
        made.step(random_examples([9, 8, 7], prompt_length=3, seed=seed), [0] * 3)
    return made


def mean_loss(learner: Learner, slot: Slot) -> float:
    scores = run_to_end(score(learner.model, RECORDS, learner.device, pack_tokens=99, slots=[slot] * len(RECORDS)))
    return sum(each.loss_sum for each in scores) / sum(each.tokens for each in scores)


def test_the_regime_that_knows_the_records_is_the_start(learner: Learner) -> None:
    """Losses are means over the learned tokens; an adapter without training has the backbone's."""
    result = measure_head_start(learner, RECORDS, [0, 1, 2], (0, 1), pack_tokens=16)
    assert result.losses == pytest.approx({slot: mean_loss(learner, slot) for slot in (0, 1, 2)}, rel=1e-4)
    assert result.backbone_loss == pytest.approx(mean_loss(learner, NO_REGIME), rel=1e-4)
    assert result.mean_loss == pytest.approx(mean_loss(learner, (0, 1)), rel=1e-4)
    assert result.mean_loss != pytest.approx(result.backbone_loss, rel=1e-3)
    assert result.losses[2] == pytest.approx(result.backbone_loss, rel=1e-5)
    assert result.losses[1] < result.backbone_loss
    assert (result.slot, result.tokens) == (1, 35)


@pytest.mark.parametrize(
    ("losses", "start"), [({}, None), ({0: 2.0, 3: 2.5}, None), ({0: 1.9, 3: 1.2, 4: 1.4}, 3), ({0: 2.1, 3: 2.0}, None)]
)
def test_a_copy_must_beat_the_backbone(losses: dict[int, float], start: int | None) -> None:
    """Starting from nothing is starting from the backbone, so a tie starts from nothing."""
    assert HeadStart(2.0, losses, None, 10).slot == start


def train(learner: Learner, slot: int) -> None:
    for seed in range(4):
        learner.step(random_examples([9, 8, 7], prompt_length=3, seed=10 * slot + seed), [slot] * 3)


def test_a_reused_slot_starts_anew(make_learner: MakeLearner) -> None:
    """Weights and moments of the regime that had the slot are gone; the new ones depend on the new number only."""
    learner, other = make_learner(preset="streamlearn"), make_learner(preset="streamlearn", seed=5)
    for slot, number in ((0, 1), (1, 2)):
        learner.add_regime(slot, number)
        train(learner, slot)
    learner.add_regime(1, 9)
    other.add_regime(1, 9)
    assert all(torch.equal(value, weights(other, 1)[name]) for name, value in weights(learner, 1).items())
    assert not any(B.any() for name, B in weights(learner, 1).items() if name.endswith(".B"))
    moments = learner.moments(regime_adapter(1))
    assert moments
    assert not any(tensor.any() for tensor in moments.values())


def weights(learner: Learner, slot: int) -> dict[str, torch.Tensor]:
    own = [bank for bank in learner.banks if bank.adapter == regime_adapter(slot)]
    return {f"{bank.name}.{part}": p.detach().clone() for bank in own for part, p in (("A", bank.A), ("B", bank.B))}


def fallback(setting: Any = "auto", *, has_regimes: bool = True) -> Fallback:
    return Fallback(setting, has_regimes=has_regimes)


def measured(backbone: float, mean: float | None, *others: float) -> HeadStart:
    """Of a new regime; the likeliest known one has the first of the other losses."""
    return HeadStart(backbone, dict(enumerate(others, start=5)), mean, 100)


def test_a_loss_that_is_not_finite_decides_nothing() -> None:
    """Neither what answers the unknown nor what a regime starts from."""
    made = fallback()
    made.add(measured(2.0, math.nan, 3.0))
    assert (made.status.regimes, made.losses) == (0, [])
    assert measured(2.0, None, math.nan, 1.5).slot == 6
    assert measured(2.0, None, math.nan).slot is None
    assert measured(math.nan, None, 1.0).slot is None


def test_the_losses_are_means_over_new_regimes() -> None:
    """The likeliest regime is the nearest, not the one with the lowest loss; the lowest of the three means decides."""
    made = fallback()
    made.add(measured(2.0, 1.5, 3.0, 0.5))
    made.add(measured(3.0, 2.5, 1.5, 0.5))
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
    made.add(measured(*losses))
    assert made.answered_by == winner


@pytest.mark.parametrize(("setting", "slot"), [("mean", (2, 1, 0)), ("nearest", 1), ("backbone", NO_REGIME)])
def test_a_setting_is_obeyed_whatever_was_measured(setting: Any, slot: Slot) -> None:
    made = fallback(setting)
    made.add(measured(*{"mean": (1.0, 2.0, 1.0), "nearest": (1.0, 1.0, 2.0), "backbone": (2.0, 1.0, 1.0)}[setting]))
    assert made.answered_by == setting
    assert made.slot_for(1, (2, 1, 0)) == slot


def test_where_routing_has_no_regimes_the_adapter_answers() -> None:
    """Only the setting chooses the backbone."""
    assert fallback(has_regimes=False).answered_by == "nearest"
    assert fallback("backbone", has_regimes=False).answered_by == "backbone"
