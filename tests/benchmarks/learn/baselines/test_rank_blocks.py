"""One LoRA per task, side by side."""

import torch

from benchmarks.learn.baselines.rank_blocks import RankBlocks
from tests.benchmarks.learn.baselines.tasks import ONE, TWO, learn
from tests.learners import MakeLearner

RANK = 5


def test_a_task_moves_only_its_own_block(make_learner: MakeLearner) -> None:
    """The blocks of earlier and later tasks stay bit-equal, also with weight decay."""
    learner = make_learner(preset="lora", weight_decay=0.1)
    blocks = RankBlocks(learner, seed=0, rank=RANK)
    learn(blocks, ONE)
    before = [p.detach().clone() for p in learner.optimizer.parameters()]
    blocks.begin(1, TWO)
    blocks.step(TWO)
    for parameter, old in zip(learner.optimizer.parameters(), before, strict=True):
        own = slice(RANK, 2 * RANK)
        assert not torch.equal(parameter[:, :, own], old[:, :, own])
        rest = [i for i in range(parameter.shape[2]) if not RANK <= i < 2 * RANK]
        assert torch.equal(parameter[:, :, rest], old[:, :, rest])


def test_the_gradient_norm_counts_the_block_in_training_only(make_learner: MakeLearner) -> None:
    """A frozen block does not make the clipping of its successor stronger."""
    norms = {}
    for rank in (RANK, 20):
        learner = make_learner(preset="lora")
        norms[rank] = RankBlocks(learner, seed=0, rank=rank).step(ONE).grad_norm
    assert 0 < norms[RANK] < norms[20]
