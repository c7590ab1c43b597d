"""The transient expert: its initialization and output, CKA with the stable experts, and the probe."""

from typing import Any

import pytest
import torch
from torch import Tensor

from streamlearn.adapters.bottleneck import split_heads
from streamlearn.adapters.context import AdaptedLayer, routing_context
from streamlearn.baselines.importance import PathIntegral, SignalIntegral, TrainingPath
from streamlearn.baselines.transient import GramCka, ProbeReport, TransientExpert, probe
from streamlearn.learner.evaluate import token_groups
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.settings import ProbeSettings
from tests.doubles import random_examples
from tests.learners import MakeLearner, make_learner, snapshot, tiny

__all__ = ["make_learner", "tiny"]  # fixtures


# Shape suffixes: T tokens, O out features, H heads, K stable experts a head, R rank of an expert, also the transient.
H, K, R = 2, 3, 4
NUM_TOKENS, OUT = 50, 11


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bottlenecks() -> tuple[Tensor, Tensor]:
    """Not centered, and correlated: each stable expert contains part of the transient one."""
    te_HRT = numbers(H, R, NUM_TOKENS, seed=1) + 3.0
    mix_HKRR = numbers(H, K, R, R, seed=2) * torch.tensor([0.0, 0.5, 5.0]).view(1, K, 1, 1)
    return te_HRT, torch.einsum("hkrn,hnt->hkrt", mix_HKRR, te_HRT) + numbers(H, K, R, NUM_TOKENS, seed=3)


def outs() -> tuple[Tensor, Tensor]:
    return numbers(H, R, OUT, seed=4), numbers(H, K, R, OUT, seed=5)


def dense(te_HRT: Tensor, se_HKRT: Tensor, B_te_HRO: Tensor, B_se_HKRO: Tensor) -> Tensor:
    """CP-MoE eq. 9 on whole centered activation matrices, one head and one expert at a time."""
    score_HK = torch.zeros(len(te_HRT), se_HKRT.shape[1], dtype=torch.float64)
    for h in range(len(te_HRT)):
        Z_te_TO = te_HRT[h].T @ B_te_HRO[h]
        Z_te_TO = Z_te_TO - Z_te_TO.mean(0)
        for k in range(se_HKRT.shape[1]):
            Z_se_TO = se_HKRT[h, k].T @ B_se_HKRO[h, k]
            Z_se_TO = Z_se_TO - Z_se_TO.mean(0)
            norms = torch.linalg.norm(Z_te_TO.T @ Z_te_TO) * torch.linalg.norm(Z_se_TO.T @ Z_se_TO)
            score_HK[h, k] = torch.linalg.norm(Z_se_TO.T @ Z_te_TO) ** 2 / norms
    return score_HK.float()


def score(te_HRT: Tensor, se_HKRT: Tensor, B_te_HRO: Tensor, B_se_HKRO: Tensor) -> Tensor:
    cka = GramCka()
    cka.add(te_HRT, se_HKRT)
    return cka.score(B_te_HRO, B_se_HKRO)


def test_equals_the_equation() -> None:
    """Accumulated moments give the CKA of the full activation matrices."""
    result = score(*bottlenecks(), *outs())
    torch.testing.assert_close(result, dense(*bottlenecks(), *outs()))
    assert result.dtype == torch.float32
    assert result.max() - result.min() > 0.2  # some experts are similar, some are not


def test_rotating_or_scaling_an_output_changes_nothing() -> None:
    """Linear CKA is invariant to orthogonal maps and scaling of either side."""
    B_te_HRO, B_se_HKRO = outs()
    rotation_OO, _ = torch.linalg.qr(numbers(OUT, OUT, seed=6))
    expected = score(*bottlenecks(), B_te_HRO, B_se_HKRO)
    torch.testing.assert_close(score(*bottlenecks(), B_te_HRO @ rotation_OO, B_se_HKRO), expected)
    torch.testing.assert_close(score(*bottlenecks(), B_te_HRO, 1e-3 * B_se_HKRO @ rotation_OO), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_expert_without_activation_scores_zero(dtype: torch.dtype) -> None:
    """The 0 / 0 of a fresh expert, on either side, is 0; the scores of the others do not change."""
    te_HRT, se_HKRT = (x.to(dtype) for x in bottlenecks())
    B_te_HRO, B_se_HKRO = (x.to(dtype) for x in outs())
    fresh_HKRO = B_se_HKRO.clone()
    fresh_HKRO[:, 1] = 0
    expected = score(te_HRT, se_HKRT, B_te_HRO, B_se_HKRO)
    expected[:, 1] = 0
    assert torch.equal(score(te_HRT, se_HKRT, B_te_HRO, fresh_HKRO), expected)
    assert torch.equal(score(te_HRT, se_HKRT, torch.zeros_like(B_te_HRO), B_se_HKRO), torch.zeros(H, K))


def test_a_constant_activation_scores_zero() -> None:
    """Rounding noise after centering does not count as similarity."""
    te_HRT, se_HKRT = bottlenecks()
    se_HKRT[:, 0] = se_HKRT[:, 0, :, :1]
    result = score(te_HRT, se_HKRT, *outs())
    assert (result[:, 0] == 0).all()
    assert (result[:, 1:] > 0).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_fewer_than_two_tokens_score_zero(tokens: int) -> None:
    """One token has no variance."""
    te_HRT, se_HKRT = bottlenecks()
    assert torch.equal(score(te_HRT[..., :tokens], se_HKRT[..., :tokens], *outs()), torch.zeros(H, K))
    assert torch.equal(GramCka().score(*outs()), torch.zeros(H, K))


WARM_UP = random_examples([12, 9, 14, 11, 10, 13], prompt_length=4, seed=5)
SETTINGS = ProbeSettings(warmup_tokens=200, similarity_tokens=40)


def trained(make_learner: MakeLearner, preset: str = "mh-moe", **changes: Any) -> Learner:
    learner = make_learner(preset=preset, changes=changes)
    for seed in range(4):
        learner.step(random_examples([9, 8, 7], prompt_length=3, seed=seed), [0, 0, 0])
    return learner


def probed(learner: Learner, seed: int = 3, measure: type[TrainingPath] | None = PathIntegral) -> ProbeReport:
    return probe(learner, WARM_UP, SETTINGS, seed=seed, measure=measure)


@pytest.mark.parametrize("measure", [None, PathIntegral])
def test_a_probe_leaves_the_learner_as_it_was(make_learner: MakeLearner, measure: type[TrainingPath] | None) -> None:
    """Weights, optimizer, biases, counts, loads and random state are bit-equal; the same parameters are trainable."""
    learner = trained(make_learner)
    before, rng = snapshot(learner), torch.get_rng_state()
    loads = [bank.load_HK.clone() for bank in learner.banks if bank.load_HK is not None]
    probed(learner, measure=measure)
    after = snapshot(learner)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.requires_grad and p.grad is None for p in learner.optimizer.parameters())
    assert all(torch.equal(a, b.load_HK) for a, b in zip(loads, learner.banks, strict=True) if b.load_HK is not None)


def test_a_probe_is_a_function_of_its_arguments(make_learner: MakeLearner) -> None:
    """The same seed gives the same report, so a probe can be repeated after a restart; another seed does not."""
    learner = trained(make_learner)
    one, two = (probed(learner) for _ in range(2))
    other = probed(learner, seed=4)

    def flat(values: Any) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in values.values()])

    assert torch.equal(flat(one.similarity), flat(two.similarity))
    assert torch.equal(flat(one.importance), flat(two.importance))
    assert not torch.equal(flat(one.importance), flat(other.importance))


def test_the_transient_expert_learns(make_learner: MakeLearner) -> None:
    """It lowers the loss of its last records when the warm-up is repeated, at the learner's own rate."""
    learner = trained(make_learner)
    report = probe(learner, WARM_UP * 4, SETTINGS, seed=0)
    without, with_it = report.losses
    last = list(token_groups(WARM_UP * 4, 20))[-4:]
    measured = []
    for group in last:  # a third of twelve steps
        packed = pack(group, learner.device)
        with torch.no_grad(), routing_context(learner.model, packed.context()):
            measured.append(float(packed_loss(learner.forward, packed).mean))
    assert without == pytest.approx(sum(measured) / len(measured))
    assert with_it < without - 0.1
    assert not report.failed
    assert report.tokens == 4 * sum(map(len, WARM_UP))


def test_a_probe_that_only_unlearns_has_failed(make_learner: MakeLearner) -> None:
    """At a rate that is too high, on records that the experts know."""
    learner = make_learner()
    for _ in range(40):
        learner.step(WARM_UP)
    assert probe(learner, WARM_UP * 2, ProbeSettings(warmup_tokens=200, similarity_tokens=40, lr=1.0), seed=0).failed


@pytest.mark.parametrize(("losses", "failed"), [((2.0, 1.9), False), ((1.0, 1.0), True), ((1.0, float("nan")), True)])
def test_a_probe_must_lower_the_loss(make_learner: MakeLearner, losses: tuple[float, float], failed: bool) -> None:
    """Of the same records, to a finite value."""
    assert ProbeReport(TransientExpert(make_learner().banks, seed=0), {}, {}, losses, 0).failed is failed


@pytest.mark.parametrize("measure", [PathIntegral, SignalIntegral])
def test_importance_is_one_for_all_experts_of_a_head(make_learner: MakeLearner, measure: type[TrainingPath]) -> None:
    """Of the size of one expert, never negative; none is measured without a path."""
    learner = trained(make_learner)
    assert probed(learner, measure=None).importance == {}
    result = probed(learner, measure=measure).importance
    for bank in learner.banks:
        for name, parameter in (("A", bank.A), ("B", bank.B)):
            rank = 1 if measure is SignalIntegral else parameter.shape[2]
            assert result[f"{bank.name}.{name}"].shape == (len(parameter), 1, rank, parameter.shape[3])
    assert all((omega >= 0).all() for omega in result.values())
    assert any(omega.any() for omega in result.values())


def test_importance_equals_a_loop_over_its_equations(make_learner: MakeLearner) -> None:
    """CP-MoE eq. 6 and 7 along the steps of AdamW, each gradient by autograd through a fresh transient expert."""
    learner = trained(make_learner, preset="cp-moe")
    report = probed(learner)
    expert = TransientExpert(learner.banks, seed=3)
    start = {name: p.detach().clone() for name, p in expert.parameters().items()}
    omega = {name: torch.zeros_like(p) for name, p in start.items()}
    mean, square = ({name: torch.zeros_like(p) for name, p in start.items()} for _ in range(2))
    for step, group in enumerate(token_groups(WARM_UP, 20), start=1):
        packed = pack(group, learner.device)
        context = packed.context()
        context.parallel_adapter = expert
        with routing_context(learner.model, context):
            loss = packed_loss(learner.forward, packed).mean
        gradients = torch.autograd.grad(loss, list(expert.parameters().values()))
        for (name, p), g in zip(expert.parameters().items(), gradients, strict=True):
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.95 * square[name] + 0.05 * g.square()
            moved = -learner.lr * (mean[name] / (1 - 0.9**step)) / ((square[name] / (1 - 0.95**step)).sqrt() + 1e-6)
            omega[name] -= g * moved
            p.data += moved
    for name, p in expert.parameters().items():
        expected = (omega[name] / ((p.detach() - start[name]).square() + 1e-3)).clamp_min(0)
        torch.testing.assert_close(report.importance[name], expected, rtol=1e-3, atol=1e-6)


def test_a_transient_expert_has_no_effect_before_it_is_trained(make_learner: MakeLearner) -> None:
    """Section 3.2.1: E(x) = 0 at s = 0."""
    learner = trained(make_learner)
    packed = pack(WARM_UP, learner.device)
    losses = []
    for parallel_adapter in (None, TransientExpert(learner.banks, seed=1)):
        context = packed.context()
        context.parallel_adapter = parallel_adapter
        with torch.no_grad(), routing_context(learner.model, context):
            losses.append(packed_loss(learner.forward, packed).token_L)
    assert torch.equal(*losses)


def test_its_output_is_added_beside_the_frozen_linear(make_learner: MakeLearner) -> None:
    """Eq. (4): y plus alpha / r times the sum over heads of B A h, for the layer that calls it."""
    learner = make_learner(preset="mh-moe")
    expert = TransientExpert(learner.banks, seed=1)
    bank = learner.banks[1]
    with torch.no_grad():
        expert.B[bank.name].normal_(generator=torch.Generator().manual_seed(2))
        x_TD = torch.randn(5, bank.layer.in_features, generator=torch.Generator().manual_seed(3))
        y_TO = torch.randn(5, bank.layer.out_features, generator=torch.Generator().manual_seed(4))
        result = expert(bank.info, x_TD, y_TO.clone())
        h_HTS = split_heads(x_TD, len(bank.A))
        added = torch.einsum("hts,hrs,hro->to", h_HTS, expert.A[bank.name][:, 0], expert.B[bank.name][:, 0])
    torch.testing.assert_close(result, y_TO + bank.info.scaling * added, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["mh-moe", "cp-moe"])
def test_similarity_is_measured_in_the_stable_model(make_learner: MakeLearner, preset: str) -> None:
    """Eq. 9, one layer, head and expert at a time, on the inputs that layers have without the transient expert."""
    learner = trained(make_learner, preset=preset)
    expert = probed(learner).expert
    inputs: dict[str, Tensor] = {}

    def observe(layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        inputs[layer.name] = x_TD.reshape(-1, x_TD.shape[-1]).double()
        return y

    packed = pack(WARM_UP, learner.device)
    context = packed.context()
    context.parallel_adapter = observe
    with torch.no_grad(), routing_context(learner.model, context):
        packed_loss(learner.forward, packed)
    result = expert.similarity(learner, WARM_UP)
    for bank in learner.banks:
        h_HTS = split_heads(inputs[bank.name], len(bank.A))
        te_HRT = torch.einsum("hts,hrs->hrt", h_HTS, expert.A[bank.name][:, 0].double())
        se_HKRT = torch.einsum("hts,hkrs->hkrt", h_HTS, bank.A.double())
        expected = dense(te_HRT, se_HKRT, expert.B[bank.name][:, 0].double(), bank.B.double())
        torch.testing.assert_close(result[bank.name], expected.detach().nan_to_num(), rtol=1e-4, atol=1e-5)
    assert max(float(h.max()) for h in result.values()) > 0
