"""The MoT benchmark: data, equations, algorithm 1 and a short comparison."""

from dataclasses import replace

import orjson
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.mot.compare import MODELS, ComparisonSettings, figures
from benchmarks.mot.models import (
    ExpertVariant,
    Hyperparameters,
    Mixture,
    MultiHeadTransformer,
    Schedule,
    TransformerExperts,
    attended,
    attention_free_floor,
    draw,
    train_experts,
    update_experts,
)

NOISY = Mixture(noise=0.8)
SHORT = Schedule(iterations=60, stage_1_ends=30, stage_2_ends=40, num_samples=64, num_test_samples=256, test_every=5)


def generator(seed: int = 0) -> torch.Generator:
    """A generator with its own seed."""
    return torch.Generator().manual_seed(seed)


def experts(*, attention: bool = True) -> TransformerExperts:
    """Five experts with a random router."""
    model = TransformerExperts(num_experts=5, dim=NOISY.dim, init=2.0, attention=attention, generator=generator())
    model.theta_MD = torch.randn(5, NOISY.dim, generator=generator(1))
    return model


def test_a_sample_is_of_definition_1() -> None:
    """It has its class signal, its label's signal and one distractor at three positions; the rest is noise."""
    mixture = replace(NOISY, noise=0.0)
    samples = draw(mixture, 2000, generator())
    N = mixture.num_classes
    total_KD = samples.x_KLD.sum(1)  # without noise the sum names the three signals
    sample_K = torch.arange(2000)
    assert torch.equal(total_KD[:, :N].argmax(1), samples.class_K)
    assert torch.equal(total_KD[sample_K, N + samples.class_K], samples.y_K)
    assert (total_KD[:, N : 2 * N].abs().sum(1) == 2).all()
    assert (samples.x_KLD.abs().sum(-1) == 1).sum() == 3 * 2000
    assert torch.bincount(samples.class_K).min() > 400
    assert samples.y_K.mean().abs() < 0.1


def test_the_floor_is_the_loss_of_a_perfectly_routed_linear_expert() -> None:
    """The best scale along the label's own signal has the loss of the closed form."""
    samples = draw(NOISY, 200_000, generator())
    sample_K = torch.arange(200_000)
    yf_K = samples.y_K * samples.x_KLD.sum(1)[sample_K, NOISY.num_classes + samples.class_K]
    best = min(softplus(-scale * yf_K).mean().item() for scale in range(2, 30))
    assert best == pytest.approx(attention_free_floor(NOISY), rel=0.03)


def test_attention_equals_equation_4() -> None:
    """It is the sum over queries, each with the softmax over all keys."""
    x_KLD = draw(NOISY, 3, generator()).x_KLD
    W_KQ_KDD = torch.randn(3, NOISY.dim, NOISY.dim, generator=generator(1))
    for k, found_D in enumerate(attended(x_KLD, W_KQ_KDD)):
        expected_D = torch.zeros(NOISY.dim)
        for x_D in x_KLD[k]:
            expected_D += x_KLD[k].T @ (x_KLD[k] @ W_KQ_KDD[k] @ x_D).softmax(0)
        torch.testing.assert_close(found_D, expected_D)


@pytest.mark.parametrize("attention", [True, False])
def test_gradients_are_those_of_the_two_losses(attention: bool) -> None:
    """Eq. 12 and 13 agree with automatic differentiation of eq. 5 and 7; for the router, f is a constant."""
    model, samples = experts(attention=attention), draw(NOISY, 40, generator(2))
    h_KM = model.logits(samples.x_KLD)
    expert_K = h_KM.argmax(1)
    W_MD, theta_MD = model.W_MD.clone().requires_grad_(), model.theta_MD.clone().requires_grad_()
    F_KD = model.features(samples.x_KLD, expert_K)
    f_K = (F_KD * W_MD[expert_K]).sum(1)
    (expected_MD,) = torch.autograd.grad(softplus(-samples.y_K * f_K).mean(), W_MD)
    torch.testing.assert_close(model.ffn_gradient(F_KD, samples.y_K, expert_K), expected_MD)
    pi_K = (samples.x_KLD.sum(1) @ theta_MD.T).softmax(1)[torch.arange(40), expert_K]
    (expected_MD,) = torch.autograd.grad(softplus(-samples.y_K * f_K.detach() * pi_K).mean(), theta_MD)
    torch.testing.assert_close(model.router_gradient(samples, f_K.detach(), h_KM, expert_K), expected_MD)


def test_the_transformer_equals_its_equation() -> None:
    """It is the sum over tokens and heads, then over the hidden units."""
    model = MultiHeadTransformer(3, 4, NOISY.dim, generator=generator())
    x_LD = draw(NOISY, 1, generator(1)).x_KLD[0]
    W_KQ_HDD = model.W_QK_DHD.permute(1, 2, 0)
    expected = torch.zeros(())
    for x_D in x_LD:
        heads = [x_LD.T @ (x_LD @ W_KQ_DD @ x_D).softmax(0) for W_KQ_DD in W_KQ_HDD]
        for j in range(4):
            hidden = torch.stack([model.W_JHD[j, h] @ heads[h] for h in range(3)]).sum()
            expected = expected + model.a_J[j] * hidden.relu()
    torch.testing.assert_close(model.output(x_LD[None])[0], expected)


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


def test_a_short_comparison_runs_to_the_end() -> None:
    """Of all models; the result is JSON."""
    settings = ComparisonSettings(seeds=(0,), step_sizes=(30.0,), schedule=SHORT, mixtures={"low": Mixture(0.2)})
    result = orjson.loads(orjson.dumps(figures(settings)))
    for level in result["noise"].values():
        assert set(level["models"]) == {model.name for model in MODELS}
        assert level["models"]["mot_given"]["routing"][0]["purity"] == 1
