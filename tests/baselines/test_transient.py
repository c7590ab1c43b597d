"""The transient expert: its initialization and output, CKA with the stable experts, and the probe."""

from typing import Any

import pytest
import torch
from torch import Tensor

from streamlearn.adapters.bottleneck import split_heads
from streamlearn.adapters.context import routing_context
from streamlearn.baselines.transient import GramCka, ProbeReport, TransientExpert, probe
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.settings import ConsolidateSettings, ProbeSettings
from tests.doubles import random_examples
from tests.learners import MakeLearner, hooks_of, make_learner, snapshot, tiny

__all__ = ["make_learner", "tiny"]  # fixtures


# Shape suffixes: T tokens, O out features, H heads, K stable experts a head, R rank, N rank of the transient expert.
H, K, R, N = 2, 3, 4, 5
NUM_TOKENS, OUT = 50, 11


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bottlenecks() -> tuple[Tensor, Tensor]:
    """Not centered, and correlated: each stable expert contains part of the transient one."""
    te_HNT = numbers(H, N, NUM_TOKENS, seed=1) + 3.0
    mix_HKRN = numbers(H, K, R, N, seed=2) * torch.tensor([0.0, 0.5, 5.0]).view(1, K, 1, 1)
    return te_HNT, torch.einsum("hkrn,hnt->hkrt", mix_HKRN, te_HNT) + numbers(H, K, R, NUM_TOKENS, seed=3)


def outs() -> tuple[Tensor, Tensor]:
    return numbers(H, N, OUT, seed=4), numbers(H, K, R, OUT, seed=5)


def dense(te_HNT: Tensor, se_HKRT: Tensor, B_te_HNO: Tensor, B_se_HKRO: Tensor) -> Tensor:
    """CP-MoE eq. 9 on whole centered activation matrices, one head and one expert at a time."""
    score_HK = torch.zeros(len(te_HNT), se_HKRT.shape[1], dtype=torch.float64)
    for h in range(len(te_HNT)):
        Z_te_TO = te_HNT[h].T @ B_te_HNO[h]
        Z_te_TO = Z_te_TO - Z_te_TO.mean(0)
        for k in range(se_HKRT.shape[1]):
            Z_se_TO = se_HKRT[h, k].T @ B_se_HKRO[h, k]
            Z_se_TO = Z_se_TO - Z_se_TO.mean(0)
            norms = torch.linalg.norm(Z_te_TO.T @ Z_te_TO) * torch.linalg.norm(Z_se_TO.T @ Z_se_TO)
            score_HK[h, k] = torch.linalg.norm(Z_se_TO.T @ Z_te_TO) ** 2 / norms
    return score_HK.float()


def score(te_HNT: Tensor, se_HKRT: Tensor, B_te_HNO: Tensor, B_se_HKRO: Tensor) -> Tensor:
    cka = GramCka()
    cka.add(te_HNT, se_HKRT)
    return cka.score(B_te_HNO, B_se_HKRO)


def test_equals_the_equation() -> None:
    """Accumulated moments give the CKA of the full activation matrices."""
    result = score(*bottlenecks(), *outs())
    torch.testing.assert_close(result, dense(*bottlenecks(), *outs()))
    assert result.dtype == torch.float32
    assert result.max() - result.min() > 0.2  # some experts are similar, some are not


def test_rotating_or_scaling_an_output_changes_nothing() -> None:
    """Linear CKA is invariant to orthogonal maps and scaling of either side."""
    B_te_HNO, B_se_HKRO = outs()
    rotation_OO, _ = torch.linalg.qr(numbers(OUT, OUT, seed=6))
    expected = score(*bottlenecks(), B_te_HNO, B_se_HKRO)
    torch.testing.assert_close(score(*bottlenecks(), B_te_HNO @ rotation_OO, B_se_HKRO), expected)
    torch.testing.assert_close(score(*bottlenecks(), B_te_HNO, 1e-3 * B_se_HKRO @ rotation_OO), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_expert_without_activation_scores_zero(dtype: torch.dtype) -> None:
    """The 0 / 0 of a fresh expert, on either side, is 0; the scores of the others do not change."""
    te_HNT, se_HKRT = (x.to(dtype) for x in bottlenecks())
    B_te_HNO, B_se_HKRO = (x.to(dtype) for x in outs())
    fresh_HKRO = B_se_HKRO.clone()
    fresh_HKRO[:, 1] = 0
    expected = score(te_HNT, se_HKRT, B_te_HNO, B_se_HKRO)
    expected[:, 1] = 0
    assert torch.equal(score(te_HNT, se_HKRT, B_te_HNO, fresh_HKRO), expected)
    assert torch.equal(score(te_HNT, se_HKRT, torch.zeros_like(B_te_HNO), B_se_HKRO), torch.zeros(H, K))


def test_a_constant_activation_scores_zero() -> None:
    """Rounding noise after centering does not count as similarity."""
    te_HNT, se_HKRT = bottlenecks()
    se_HKRT[:, 0] = se_HKRT[:, 0, :, :1]
    result = score(te_HNT, se_HKRT, *outs())
    assert (result[:, 0] == 0).all()
    assert (result[:, 1:] > 0).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_fewer_than_two_tokens_score_zero(tokens: int) -> None:
    """One token has no variance."""
    te_HNT, se_HKRT = bottlenecks()
    assert torch.equal(score(te_HNT[..., :tokens], se_HKRT[..., :tokens], *outs()), torch.zeros(H, K))
    assert torch.equal(GramCka().score(*outs()), torch.zeros(H, K))


WARM_UP = random_examples([12, 9, 14, 11, 10, 13], prompt_length=4, seed=5)
SETTINGS = ProbeSettings(warmup_tokens=200, similarity_tokens=40)


def trained(make_learner: MakeLearner, preset: str = "mh-moe", **changes: Any) -> Learner:
    learner = make_learner(preset=preset, changes=changes)
    for seed in range(4):
        learner.step(random_examples([9, 8, 7], prompt_length=3, seed=seed), [0, 0, 0])
    return learner


def probed(learner: Learner, seed: int = 3, **consolidate: Any) -> ProbeReport:
    accumulation = hooks_of(learner)._objective.accumulation
    return probe(learner, WARM_UP, SETTINGS, ConsolidateSettings(**consolidate), accumulation, seed=seed)


@pytest.mark.parametrize("importance", ["path", "transient"])
def test_a_probe_leaves_the_learner_as_it_was(make_learner: MakeLearner, importance: str) -> None:
    """Weights, optimizer, biases, counts, loads and random state are bit-equal; the same parameters are trainable."""
    learner = trained(make_learner)
    before, rng = snapshot(learner), torch.get_rng_state()
    loads = [bank.load_HK.clone() for bank in learner.banks if bank.load_HK is not None]
    probed(learner, importance=importance)
    after = snapshot(learner)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.requires_grad and p.grad is None for p in learner.optimizer.parameters())
    assert all(torch.equal(a, b.load_HK) for a, b in zip(loads, learner.banks, strict=True) if b.load_HK is not None)


def test_a_probe_is_a_function_of_its_arguments(make_learner: MakeLearner) -> None:
    """The same seed gives the same report, so a probe can be repeated after a restart; another seed does not."""
    learner = trained(make_learner)
    one, two = (probed(learner, importance="transient", coordinates="random") for _ in range(2))
    other = probed(learner, seed=4, importance="transient", coordinates="random")

    def flat(values: Any) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in values.values()])

    assert torch.equal(flat(one.similarity), flat(two.similarity))
    assert torch.equal(flat(one.importance), flat(two.importance))
    assert not torch.equal(flat(one.importance), flat(other.importance))


def test_the_transient_expert_learns(make_learner: MakeLearner) -> None:
    """Its loss on the warm-up falls when the warm-up is repeated."""
    learner = trained(make_learner)
    report = probe(learner, WARM_UP * 4, SETTINGS, ConsolidateSettings(), "sum", seed=0)
    assert report.losses[-1] < report.losses[0] - 0.1
    assert report.tokens == 4 * sum(map(len, WARM_UP))


@pytest.mark.parametrize("accumulation", ["sum", "per_regime"])
def test_importance_is_optional(make_learner: MakeLearner, accumulation: str) -> None:
    """Computed for `importance: transient` only; never negative, in the shapes of the anchors' importance."""
    learner = trained(make_learner, accumulation=accumulation, anchor_strength=1.0)
    assert probed(learner, importance="path").importance == {}
    result = probed(learner, importance="transient").importance
    for bank in learner.banks:
        for name in (f"{bank.name}.A", f"{bank.name}.B"):
            assert result[name].shape == hooks_of(learner).importance()[name].shape
    assert all((omega >= 0).all() for omega in result.values())
    assert any(omega.any() for omega in result.values())


@pytest.mark.parametrize("coordinates", ["bank", "random"])
def test_a_transient_expert_has_no_effect_before_it_is_trained(make_learner: MakeLearner, coordinates: Any) -> None:
    """Section 3.2.1: E(x) = 0 at s = 0, for any A."""
    learner = trained(make_learner)
    packed = pack(WARM_UP, learner.device)
    losses = []
    for parallel_adapter in (None, TransientExpert(learner.banks, coordinates, seed=1)):
        context = packed.context()
        context.parallel_adapter = parallel_adapter
        with torch.no_grad(), routing_context(learner.model, context):
            losses.append(packed_loss(learner.forward, packed).token_L)
    assert torch.equal(*losses)


def test_its_output_is_added_beside_the_frozen_linear(make_learner: MakeLearner) -> None:
    """Eq. (1): y plus alpha / r times the sum over heads and blocks of B A h, for the layer that calls it."""
    learner = make_learner(preset="mh-moe")
    expert = TransientExpert(learner.banks, "random", seed=1)
    bank = learner.banks[1]
    with torch.no_grad():
        expert.B[bank.name].normal_(generator=torch.Generator().manual_seed(2))
        x_TD = torch.randn(5, bank.layer.in_features, generator=torch.Generator().manual_seed(3))
        y_TO = torch.randn(5, bank.layer.out_features, generator=torch.Generator().manual_seed(4))
        result = expert(bank.info, x_TD, y_TO.clone())
        h_HTS = split_heads(x_TD, len(bank.A))
        added = torch.einsum("hts,hkrs,hkro->to", h_HTS, expert.A[bank.name], expert.B[bank.name])
    torch.testing.assert_close(result, y_TO + bank.info.scaling * added, rtol=1e-4, atol=1e-4)


def test_the_coordinates_of_the_bank_are_the_stable_experts_own(make_learner: MakeLearner) -> None:
    """`bank` starts each block from its stable expert's A; `random` starts from another."""
    learner = trained(make_learner)
    own = TransientExpert(learner.banks, "bank", seed=1)
    other = TransientExpert(learner.banks, "random", seed=1)
    for bank in learner.banks:
        assert torch.equal(own.A[bank.name], bank.A)
        assert not torch.equal(other.A[bank.name], bank.A)
        assert other.A[bank.name].abs().max() <= bank.A.shape[-1] ** -0.5
