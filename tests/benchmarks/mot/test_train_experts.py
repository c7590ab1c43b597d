"""Algorithm 1."""

import pytest
import torch
from torch import Tensor

from benchmarks.mot.models import (
    ExpertVariant,
    Hyperparameters,
    Schedule,
    TransformerExperts,
    attention_free_floor,
    draw,
    train_experts,
    update_experts,
)
from tests.benchmarks.mot.models import NOISY, SHORT, experts, generator

GIVEN = Schedule(iterations=450, stage_1_ends=250, stage_2_ends=350, num_samples=512, num_test_samples=20_000)


def update(model: TransformerExperts, t: int) -> tuple[Tensor, Tensor]:
    """How far each expert's W and W_KQ move in iteration t when only experts 0 and 1 receive samples."""
    samples = draw(NOISY, 40, generator(2))
    assert model.W_KQ_MDD is not None
    W_MD, W_KQ_MDD = model.W_MD.clone(), model.W_KQ_MDD.clone()
    update_experts(model, samples, samples.class_K % 2, SHORT, Hyperparameters(), t=t, step_size=3.0)
    return (model.W_MD - W_MD).norm(dim=1), (model.W_KQ_MDD - W_KQ_MDD).norm(dim=(1, 2))


def test_each_stage_moves_what_algorithm_1_moves() -> None:
    """Stage I moves W by eta, stage II only W_KQ, stage III only W. An expert without samples never moves."""
    moved_W, moved_W_KQ = update(experts(), SHORT.stage_1_ends)
    torch.testing.assert_close(moved_W[:2], torch.full((2,), Hyperparameters().ffn_stage_1), atol=1e-6, rtol=1e-3)
    assert (moved_W_KQ == 0).all()
    assert (moved_W[2:] == 0).all()
    moved_W, moved_W_KQ = update(experts(), SHORT.stage_2_ends)
    assert (moved_W == 0).all()
    assert (moved_W_KQ[:2] > 0).all()
    assert (moved_W_KQ[2:] == 0).all()
    moved_W, moved_W_KQ = update(experts(), SHORT.iterations)
    assert (moved_W[:2] > 0).all()
    assert (moved_W[2:] == 0).all()
    assert (moved_W_KQ == 0).all()


def test_attention_goes_below_the_floor_of_lemma_1() -> None:
    """With the class given, experts end at the closed-form floor without attention, and far below it with attention."""
    finals = []
    for attention in (False, True):
        variant = ExpertVariant(attention=attention, class_given=True)
        run = train_experts(NOISY, GIVEN, Hyperparameters(ffn_stage_1=0.03), variant, step_size=30.0, seed=0)
        finals.append(run.points[-1].loss)
    floor = attention_free_floor(NOISY)
    assert finals[0] == pytest.approx(floor, rel=0.15)
    assert finals[1] < 0.4 * floor
