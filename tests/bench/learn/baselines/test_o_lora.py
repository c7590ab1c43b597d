"""O-LoRA: one LoRA per task."""

import torch

from streamlearn.bench.learn.baselines.o_lora import OLora, overlap_gradient
from tests.bench.learn.baselines.tasks import ONE, TWO, learn
from tests.learners import MakeLearner

RANK = 5


def test_a_task_moves_only_its_own_block(make_learner: MakeLearner) -> None:
    """The blocks of earlier and later tasks stay bit-equal, also with weight decay."""
    learner = make_learner(preset="lora", weight_decay=0.1)
    olora = OLora(learner, seed=0, rank=RANK)
    learn(olora, ONE)
    before = [p.detach().clone() for p in learner.optimizer.parameters()]
    olora.begin(1, TWO)
    olora.step(TWO)
    for parameter, old in zip(learner.optimizer.parameters(), before, strict=True):
        own = slice(RANK, 2 * RANK)
        assert not torch.equal(parameter[:, :, own], old[:, :, own])
        rest = [i for i in range(parameter.shape[2]) if not RANK <= i < 2 * RANK]
        assert torch.equal(parameter[:, :, rest], old[:, :, rest])


def test_the_penaltys_gradient_is_autograds() -> None:
    """That of the sum of absolute products."""
    earlier, own = torch.randn(6, 8), torch.randn(3, 8, requires_grad=True)
    (expected,) = torch.autograd.grad((earlier @ own.T).abs().sum(), own)
    torch.testing.assert_close(overlap_gradient(earlier, own.detach()), expected)


def test_blocks_become_orthogonal(make_learner: MakeLearner) -> None:
    """With a strong penalty the second task's A hardly overlaps the first's."""
    overlap = {}
    for strength in (0.0, 50.0):
        learner = make_learner(preset="lora")
        learn(OLora(learner, seed=0, rank=RANK, strength=strength), ONE, TWO, steps=40)
        A_PS = learner.banks[0].A.detach()[0, 0]
        overlap[strength] = float((A_PS[:RANK] @ A_PS[RANK : 2 * RANK].T).abs().sum())
    assert overlap[50.0] < 0.5 * overlap[0.0]
