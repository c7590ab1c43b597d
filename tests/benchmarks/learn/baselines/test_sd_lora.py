"""SD-LoRA."""

import pytest
import torch

from benchmarks.learn.baselines.sd_lora import SdLora
from streamlearn.learner.learner import Learner
from tests.benchmarks.learn.baselines.tasks import ONE, TWO, learn, loss_on
from tests.learners import MakeLearner

RANK = 5


def product(learner: Learner, block: slice) -> torch.Tensor:
    """B A of one block of the first linear."""
    bank = learner.banks[0]
    return bank.B.detach()[0, 0, block].mT @ bank.A.detach()[0, 0, block]


def test_directions_stay_and_magnitudes_learn(make_learner: MakeLearner) -> None:
    """The first task's A and its direction are bit-equal; its product is rescaled; its norm is the magnitude."""
    learner = make_learner(preset="lora", weight_decay=0.1)
    method = SdLora(learner, seed=0, rank=RANK, lr=1e-2, magnitude_lr=10.0)
    learn(method, ONE)
    first, A = product(learner, slice(0, RANK)), learner.banks[0].A.detach()[0, 0, :RANK].clone()
    method.begin(1, TWO)
    directions = method.directions[0]
    frozen, norm = directions.B_PO.clone(), float(directions.magnitude_N.detach()[0])
    assert norm == pytest.approx(float(first.norm()), rel=1e-5)
    for _ in range(3):
        method.step(TWO)
    assert torch.equal(directions.B_PO, frozen)
    assert torch.equal(learner.banks[0].A[0, 0, :RANK], A)
    learned = float(directions.magnitude_N.detach()[0])
    assert abs(learned - norm) > 1e-2
    torch.testing.assert_close(product(learner, slice(0, RANK)), first * (learned / norm), rtol=1e-4, atol=1e-6)


def test_a_new_block_does_not_change_the_function(make_learner: MakeLearner) -> None:
    """Normalizing the direction is compensated by its magnitude."""
    learner = make_learner(preset="lora")
    method = SdLora(learner, seed=0, rank=RANK, lr=1e-2)
    learn(method, ONE)
    before = loss_on(learner, ONE)
    method.begin(1, TWO)
    for each in method.directions:
        each.apply()
    assert loss_on(learner, ONE) == pytest.approx(before, rel=1e-5)


def test_a_magnitudes_gradient_is_the_slope_of_the_loss(make_learner: MakeLearner) -> None:
    """Eq. (2) equals the difference quotient."""
    learner = make_learner(preset="lora", max_grad_norm=1e9)
    method = SdLora(learner, seed=0, rank=RANK, lr=1e-2, magnitude_lr=0.0)
    learn(method, ONE)
    method.begin(1, TWO)
    directions, losses = method.directions[0], []
    for shift in (1e-2, -2e-2):
        with torch.no_grad():
            directions.magnitude_N.add_(shift)
        directions.apply()
        losses.append(loss_on(learner, TWO))
    with torch.no_grad():
        directions.magnitude_N.add_(1e-2)
    directions.apply()
    learner.step(TWO)
    assert directions.magnitude_N.grad is not None
    slope = (losses[0] - losses[1]) / 2e-2
    assert float(directions.magnitude_N.grad[0]) == pytest.approx(slope, rel=0.05, abs=1e-3)
