"""One LoRA per task: each method does what its equation says."""

import pytest
import torch

from benchmarks.learn.lora_baselines import (
    InfLora,
    OnlineLora,
    PlateauDetector,
    RankBlocks,
    SdLora,
    extended,
    input_moments,
    overlap,
)
from streamlearn.learner.learner import Learner
from tests.benchmarks.learn.kit import ONE, TWO, context_of, learn, loss_on
from tests.learners import MakeLearner

RANK = 5


def test_a_task_moves_only_its_own_block(make_learner: MakeLearner) -> None:
    """The blocks of earlier and later tasks stay bit-equal, also with weight decay."""
    learner = make_learner(preset="lora", weight_decay=0.1)
    blocks = RankBlocks(context_of(learner), rank=RANK)
    learn(blocks, ONE)
    before = [p.detach().clone() for p in learner.optimizer.parameters()]
    blocks.begin(1, TWO)
    blocks.step(TWO)
    for parameter, old in zip(learner.optimizer.parameters(), before, strict=True):
        own = slice(RANK, 2 * RANK)
        assert not torch.equal(parameter[:, :, own], old[:, :, own])
        rest = [i for i in range(parameter.shape[2]) if not RANK <= i < 2 * RANK]
        assert torch.equal(parameter[:, :, rest], old[:, :, rest])


def test_the_overlap_is_the_sum_of_absolute_products() -> None:
    """Over all rows of both; zero for orthogonal rows."""
    earlier, own = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[-2.0, 0.0], [0.0, 3.0]])
    assert float(overlap(earlier, own)) == 2 + 2 + 0 + 3
    assert float(overlap(earlier[:1], own[1:])) == 0


def product(learner: Learner, block: slice) -> torch.Tensor:
    """B A of one block of the first linear."""
    bank = learner.banks[0]
    return bank.B.detach()[0, 0, block].mT @ bank.A.detach()[0, 0, block]


def test_directions_stay_and_magnitudes_learn(make_learner: MakeLearner) -> None:
    """The first task's A and its direction are bit-equal; its product is rescaled; its norm is the magnitude."""
    learner = make_learner(preset="lora", weight_decay=0.1)
    method = SdLora(context_of(learner), rank=RANK, magnitude_lr=10.0)
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


def test_a_magnitudes_gradient_is_the_slope_of_the_loss(make_learner: MakeLearner) -> None:
    """Eq. (2) equals the difference quotient."""
    learner = make_learner(preset="lora", max_grad_norm=1e9)
    method = SdLora(context_of(learner), rank=RANK, magnitude_lr=0.0)
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


def test_a_new_block_is_orthogonal_to_earlier_inputs(make_learner: MakeLearner) -> None:
    """A maps them to zero up to what the threshold leaves out, and does not change while B is trained."""
    learner = make_learner(preset="lora")
    method = InfLora(context_of(learner), rank=RANK, threshold=0.99)
    learn(method, ONE)
    earlier = input_moments(learner, ONE)
    method.begin(1, TWO)
    designed = [bank.A.detach().clone() for bank in learner.banks]
    for bank in learner.banks:
        first, second = bank.A[0, 0, :RANK].detach(), bank.A[0, 0, RANK : 2 * RANK].detach()
        moment = earlier[bank.name]
        assert float((second @ moment @ second.mT).trace() / (second.square().sum() / 3 * moment.trace())) < 0.01
        assert float((second @ method.basis[bank.name].float()).abs().max()) < 1e-5
        torch.testing.assert_close(first @ first.mT, torch.eye(RANK) / 3, rtol=1e-4, atol=1e-5)
    method.step(TWO)
    for bank, A in zip(learner.banks, designed, strict=True):
        assert torch.equal(bank.A, A)
        assert bool(bank.B[0, 0, RANK : 2 * RANK].any())


def test_the_basis_grows_by_the_fewest_directions() -> None:
    """Those that reach the threshold; none if it is reached already."""
    moment = torch.diag(torch.tensor([6.0, 3.0, 1.0, 0.0]))
    empty = torch.zeros(4, 0, dtype=torch.float64)
    basis = extended(empty, moment, 0.8)
    assert basis.shape == (4, 2)
    torch.testing.assert_close(basis.abs(), torch.eye(4, dtype=torch.float64)[:, :2])
    assert extended(basis, moment, 0.9) is basis
    larger = extended(basis, torch.diag(torch.tensor([0.0, 0.0, 1.0, 9.0])), 0.85)
    torch.testing.assert_close(larger[:, 2].abs(), torch.eye(4, dtype=torch.float64)[:, 3])


def plateaus(losses: list[float]) -> list[int]:
    """Steps at which a plateau is reported."""
    detector = PlateauDetector(window=3, flat=0.05)
    return [step for step, loss in enumerate(losses) if detector.update(loss)]


def test_a_plateau_is_reported_once_and_needs_a_peak_before_it() -> None:
    """A falling loss has none; the next one comes after the loss rose and settled again."""
    falling = [15.0 * 0.8**step for step in range(12)]
    assert plateaus(falling) == []
    flat = [1.0] * 12
    assert plateaus(falling + flat) == [17]
    assert plateaus(falling + flat + [5.0, 4.5, 4.0, 3.0, 2.0, 1.5] + flat) == [17, 35]


def test_a_plateau_opens_a_new_block(make_learner: MakeLearner) -> None:
    """The first block stays bit-equal; the new one starts with its A; boundaries change nothing."""
    learner = make_learner(preset="lora", lr=1e-4)
    method = OnlineLora(context_of(learner), rank=RANK, window=2, flat=0.5)
    for number in range(3):
        method.begin(number, ONE)
        method.step(ONE)
        method.end(number, ONE)
    assert method.block == 0
    method.step(ONE)
    assert method.block == 1
    first, second = slice(0, RANK), slice(RANK, 2 * RANK)
    frozen = [p.detach()[:, :, first].clone() for p in learner.optimizer.parameters()]
    assert all(torch.equal(bank.A[:, :, first], bank.A[:, :, second]) for bank in learner.banks)
    method.step(TWO)
    for parameter, old in zip(learner.optimizer.parameters(), frozen, strict=True):
        assert torch.equal(parameter[:, :, first], old)
        assert not torch.equal(parameter[:, :, second], old)
