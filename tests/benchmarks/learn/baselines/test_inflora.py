"""InfLoRA."""

import torch

from benchmarks.learn.baselines.inflora import InfLora, InputMoments, extended
from benchmarks.learn.baselines.rank_blocks import RankBlocks
from tests.benchmarks.learn.baselines.tasks import ONE, TWO, learn, loss_on
from tests.learners import MakeLearner

RANK = 5


def test_a_new_block_is_orthogonal_to_earlier_inputs(make_learner: MakeLearner) -> None:
    """A maps them to zero up to what the threshold leaves out, and does not change while B is trained."""
    learner = make_learner(preset="lora")
    method = InfLora(learner, seed=0, rank=RANK, segments=2, threshold=0.99)
    learn(method, ONE)
    earlier = InputMoments.of(learner, ONE).by_name
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


def test_the_second_task_hardly_changes_the_first(make_learner: MakeLearner) -> None:
    """Freezing the earlier block is not enough: with a free A the loss on the first task rises more."""
    rise = {}
    for name in ("inflora", "blocks"):
        learner = make_learner(preset="lora")
        method: RankBlocks = RankBlocks(learner, seed=0, rank=RANK)
        if name == "inflora":
            method = InfLora(learner, seed=0, rank=RANK, segments=2, threshold=0.999)
        learn(method, ONE)
        before = loss_on(learner, ONE)
        method.begin(1, TWO)
        for _ in range(12):
            method.step(TWO)
        rise[name] = loss_on(learner, ONE) - before
    assert rise["inflora"] < 0.3 * rise["blocks"]


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
