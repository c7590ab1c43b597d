"""What a new regime starts from."""

import pytest
import torch

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.adapters.presets import regime_adapter
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.regimes.start import HeadStart, measure_head_start
from tests.doubles import random_examples
from tests.learners import MakeLearner, hooks_of, make_learner, snapshot, tiny

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
    found = measure_head_start(learner, RECORDS, [0, 1, 2], (0, 1), pack_tokens=16)
    assert found.losses == pytest.approx({slot: mean_loss(learner, slot) for slot in (0, 1, 2)}, rel=1e-4)
    assert found.backbone_loss == pytest.approx(mean_loss(learner, NO_REGIME), rel=1e-4)
    assert found.mean_loss == pytest.approx(mean_loss(learner, (0, 1)), rel=1e-4)
    assert found.mean_loss != pytest.approx(found.backbone_loss, rel=1e-3)
    assert found.losses[2] == pytest.approx(found.backbone_loss, rel=1e-5)
    assert found.losses[1] < found.backbone_loss
    assert (found.slot, found.tokens) == (1, 35)


def test_measuring_changes_nothing(learner: Learner) -> None:
    """Weights, optimizer, counts and random state."""
    before, rng = snapshot(learner), torch.get_rng_state()
    measure_head_start(learner, RECORDS, [0, 1], (0, 1), pack_tokens=64)
    after = snapshot(learner)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize(
    ("losses", "start"), [({}, None), ({0: 2.0, 3: 2.5}, None), ({0: 1.9, 3: 1.2, 4: 1.4}, 3), ({0: 2.1, 3: 2.0}, None)]
)
def test_a_copy_must_beat_the_backbone(losses: dict[int, float], start: int | None) -> None:
    """Starting from nothing is starting from the backbone, so a tie starts from nothing."""
    assert HeadStart(2.0, losses, None, 10).slot == start


def test_a_copy_has_the_same_weights_and_moves_alone(learner: Learner) -> None:
    """Training the newcomer leaves the regime that it was copied from as it is."""
    learner.add_regime(3, seed=9, start=1)

    def weights(slot: int) -> list[torch.Tensor]:
        own = [bank for bank in learner.banks if bank.adapter == f"regime{slot}"]
        return [p.detach().clone() for bank in own for p in (bank.A, bank.B)]

    copied = weights(1)
    assert all(torch.equal(one, other) for one, other in zip(weights(3), copied, strict=True))
    learner.step(RECORDS, [3] * 3)
    assert all(torch.equal(one, other) for one, other in zip(weights(1), copied, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(weights(3), copied, strict=True))


def train(learner: Learner, slot: int) -> None:
    for seed in range(4):
        learner.step(random_examples([9, 8, 7], prompt_length=3, seed=10 * slot + seed), [slot] * 3)


def test_a_regime_with_an_adapter_of_its_own_changes_no_other(make_learner: MakeLearner) -> None:
    """Its weights are those of its number, and training them moves no bit of the other regime's."""
    learner = make_learner(preset="streamlearn")
    learner.add_regime(0, 1)
    train(learner, 0)
    first = weights(learner, 0)
    assert any(B.any() for name, B in first.items() if name.endswith(".B"))
    learner.add_regime(1, 2)
    train(learner, 1)
    assert all(torch.equal(value, weights(learner, 0)[name]) for name, value in first.items())
    assert hooks_of(learner).importance() == {}


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
