"""O-LoRA: one LoRA per task, kept orthogonal."""

import torch

from benchmarks.learn.baselines.o_lora import OLora, overlap
from tests.benchmarks.learn.baselines.tasks import ONE, TWO, learn
from tests.learners import MakeLearner

RANK = 5


def test_the_overlap_is_the_sum_of_absolute_products() -> None:
    """Over all rows of both; zero for orthogonal rows."""
    earlier, own = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[-2.0, 0.0], [0.0, 3.0]])
    assert float(overlap(earlier, own)) == 2 + 2 + 0 + 3
    assert float(overlap(earlier[:1], own[1:])) == 0


def test_blocks_become_orthogonal(make_learner: MakeLearner) -> None:
    """With a strong penalty the second task's A hardly overlaps the first's."""
    overlap = {}
    for strength in (0.0, 50.0):
        learner = make_learner(preset="lora")
        learn(OLora(learner, seed=0, rank=RANK, strength=strength), ONE, TWO, steps=40)
        A_PS = learner.banks[0].A.detach()[0, 0]
        overlap[strength] = float((A_PS[:RANK] @ A_PS[RANK : 2 * RANK].T).abs().sum())
    assert overlap[50.0] < 0.5 * overlap[0.0]
