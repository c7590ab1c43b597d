"""The MoT comparison computes what the paper's equations say."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import orjson
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import softplus

from streamlearn.bench.mot.compare import HEADS, HIDDEN, MODELS, Plan, measure
from streamlearn.bench.mot.data import Mixture, attention_free_floor, draw, misrouted
from streamlearn.bench.mot.experts import Experts, attended
from streamlearn.bench.mot.rates import fit
from streamlearn.bench.mot.report import drawing, figures, show
from streamlearn.bench.mot.train import Choices, Expertise, Schedule, train_experts, update_experts
from streamlearn.bench.mot.transformer import MultiHead
from streamlearn.errors import UsageError

# Shape suffixes: K samples, L tokens, D dimensions, M experts.
NOISY = Mixture(noise=0.8)
SHORT = Schedule(iterations=60, stage_1_ends=30, stage_2_ends=40, num_samples=64, num_test_samples=256, test_every=5)
GIVEN = Schedule(iterations=450, stage_1_ends=250, stage_2_ends=350, num_samples=512, num_test_samples=20_000)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def experts(*, attention: bool = True) -> Experts:
    model = Experts(num_experts=5, dim=NOISY.dim, init=2.0, attention=attention, generator=generator())
    model.theta_MD = torch.randn(5, NOISY.dim, generator=generator(1))
    return model


def test_a_sample_is_of_definition_1() -> None:
    """Its class signal, its label's signal and one distractor stand at three places; the rest is noise."""
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


def test_noise_has_the_length_that_definition_1_gives_it() -> None:
    """A noise token's squared length is sigma^2 on average."""
    squared_KL = draw(NOISY, 4000, generator()).x_KLD.square().sum(-1)
    noise = squared_KL.sort(1).values[:, : NOISY.num_tokens - 3]  # the signals have length 1, and noise rarely has
    assert noise.mean().item() == pytest.approx(NOISY.noise**2, rel=0.1)


def test_the_floor_is_what_a_perfectly_routed_linear_expert_reaches() -> None:
    """The best of all step lengths along the label's own signal has the closed form's loss."""
    samples = draw(NOISY, 200_000, generator())
    sample_K = torch.arange(200_000)
    yf_K = samples.y_K * samples.x_KLD.sum(1)[sample_K, NOISY.num_classes + samples.class_K]
    best = min(softplus(-scale * yf_K).mean().item() for scale in range(2, 30))
    assert best == pytest.approx(attention_free_floor(NOISY), rel=0.03)


def test_misrouting_is_what_the_class_signals_alone_allow() -> None:
    """The largest projection on a class signal is another class's as often as the closed form says."""
    samples = draw(NOISY, 100_000, generator())
    chosen_K = samples.x_KLD.sum(1)[:, : NOISY.num_classes].argmax(1)
    assert (chosen_K != samples.class_K).float().mean().item() == pytest.approx(misrouted(NOISY), rel=0.03)


def test_attention_equals_equation_4() -> None:
    """Query by query, each with the softmax over all keys."""
    x_KLD = draw(NOISY, 3, generator()).x_KLD
    W_KQ_KDD = torch.randn(3, NOISY.dim, NOISY.dim, generator=generator(1))
    for k, found_D in enumerate(attended(x_KLD, W_KQ_KDD)):
        expected_D = torch.zeros(NOISY.dim)
        for x_D in x_KLD[k]:
            expected_D += x_KLD[k].T @ (x_KLD[k] @ W_KQ_KDD[k] @ x_D).softmax(0)
        torch.testing.assert_close(found_D, expected_D)


@pytest.mark.parametrize("attention", [True, False])
def test_gradients_are_those_of_the_two_losses(attention: bool) -> None:
    """Eq. 12 and 13 agree with automatic differentiation of eq. 5 and 7; the router sees f as a constant."""
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


def update(model: Experts, t: int) -> tuple[Tensor, Tensor]:
    """By how far each expert's W and W_KQ move in iteration t, when experts 0 and 1 alone get samples."""
    samples = draw(NOISY, 40, generator(2))
    assert model.W_KQ_MDD is not None
    W_MD, W_KQ_MDD = model.W_MD.clone(), model.W_KQ_MDD.clone()
    update_experts(model, samples, samples.class_K % 2, SHORT, Choices(), t=t, step_size=3.0)
    return (model.W_MD - W_MD).norm(dim=1), (model.W_KQ_MDD - W_KQ_MDD).norm(dim=(1, 2))


def test_each_stage_moves_what_algorithm_1_moves() -> None:
    """Stage I: W by eta. Stage II: W_KQ alone. Stage III: W alone. An expert without samples never moves."""
    moved_W, moved_W_KQ = update(experts(), SHORT.stage_1_ends)
    torch.testing.assert_close(moved_W[:2], torch.full((2,), Choices().ffn_stage_1), atol=1e-6, rtol=1e-3)
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


def test_the_transformer_equals_its_equation() -> None:
    """Token by token and head by head, then the hidden units over all heads."""
    model = MultiHead(3, 4, NOISY.dim, generator=generator())
    x_LD = draw(NOISY, 1, generator(1)).x_KLD[0]
    W_KQ_HDD = model.W_QK_DHD.permute(1, 2, 0)
    expected = torch.zeros(())
    for x_D in x_LD:
        heads = [x_LD.T @ (x_LD @ W_KQ_DD @ x_D).softmax(0) for W_KQ_DD in W_KQ_HDD]
        for j in range(4):
            hidden = torch.stack([model.W_JHD[j, h] @ heads[h] for h in range(3)]).sum()
            expected = expected + model.a_J[j] * hidden.relu()
    torch.testing.assert_close(model.output(x_LD[None])[0], expected)


def test_the_transformer_is_as_large_as_the_experts() -> None:
    """Weights are what both are compared at."""
    mot = Experts(Choices().num_experts, NOISY.dim, init=1.0, attention=True, generator=generator())
    assert MultiHead(HEADS, HIDDEN, NOISY.dim, generator=generator()).num_parameters == mot.num_parameters


def test_each_law_is_recovered() -> None:
    """Its own fit is exact, the other's is worse."""
    t = list(range(25, 500, 25))
    exponential = fit(t, [0.3 * 0.99**step for step in t])
    assert exponential.exponential_rate == pytest.approx(0.01005, rel=1e-3)
    assert exponential.exponential_r2 == pytest.approx(1.0)
    assert exponential.power_r2 < 0.95
    power = fit(t, [0.3 / step for step in t])
    assert power.power_exponent == pytest.approx(1.0)
    assert power.power_r2 == pytest.approx(1.0)
    assert power.exponential_r2 < 0.95
    assert fit(t, [0.5] * len(t)).power_r2 == 0


def test_attention_goes_below_the_floor_of_lemma_1() -> None:
    """With the class given, experts without attention end on the closed-form floor; with attention, far below it."""
    finals = []
    for attention in (False, True):
        expertise = Expertise(attention=attention, class_given=True)
        run = train_experts(NOISY, GIVEN, Choices(ffn_stage_1=0.03), expertise, step_size=30.0, seed=0)
        finals.append(run.points[-1].loss)
    floor = attention_free_floor(NOISY)
    assert finals[0] == pytest.approx(floor, rel=0.15)
    assert finals[1] < 0.4 * floor


def test_the_step_size_is_the_best_of_the_grid() -> None:
    """Chosen by the tuning seeds' final loss."""
    plan = Plan(seeds=(0,), step_sizes=(0.001, 30.0), schedule=SHORT)
    measured = measure(plan, NOISY, MODELS[1])
    assert measured.step_size == min(measured.tuning, key=lambda size: measured.tuning[size]) == 30.0


def test_a_short_comparison_runs_to_the_end(tmp_path: Path) -> None:
    """JSON, tables and the picture come out of two seeds of everything; the same seeds give the same numbers."""
    plan = Plan(seeds=(0, 1), step_sizes=(30.0,), schedule=SHORT)
    result = figures(plan)
    assert orjson.loads(orjson.dumps(result))["setting"]["seeds"] == [0, 1]
    for found in result["noise"].values():
        assert set(found["models"]) == {model.name for model in MODELS}
        for routing in found["models"]["mot"]["routing"]:
            torch.testing.assert_close(torch.tensor(routing["matrix"]).sum(0), torch.ones(4))
            assert sum(routing["specialised"]) == Choices().num_experts
            assert 0.25 <= routing["purity"] <= 1
        assert found["models"]["mot_given"]["routing"][0]["purity"] == 1
    again = figures(plan)["noise"]["low"]["models"]["mot"]
    assert again == result["noise"]["low"]["models"]["mot"]
    console = Console(record=True, width=200, file=StringIO())
    show(result, console)
    assert "multi-head transformer" in console.export_text()
    pytest.importorskip("matplotlib")
    drawing(tmp_path / "mot.png")(result)
    assert (tmp_path / "mot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["mot.txt", "absent/mot.png"])
def test_a_picture_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Not after minutes of measuring."""
    with pytest.raises(UsageError, match="--plot: needs a file in an existing folder"):
        drawing(tmp_path / name)
