"""Load balance, localized balance and stages: against their equations, and on a model."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.adapters import layer as routing
from streamlearn.adapters.context import AdaptedLayer, RoutingDecision
from streamlearn.adapters.tuner import SHARED
from streamlearn.baselines.balance_stages import (
    NO_TYPE,
    LoadBalance,
    LocalizedBalance,
    Stage,
    Stages,
    load_balance,
    localized_balance,
)
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack
from streamlearn.learner.optimizer import Group
from streamlearn.settings import LearnerSettings
from tests.doubles import random_examples
from tests.learners import MakeLearner, hooks_of, make_learner, tiny

__all__ = ["make_learner", "tiny"]  # fixtures

# Shape suffixes: T tokens, H heads, K experts a head, M samples.
LENGTHS = (5, 1, 9, 3)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def samples() -> Tensor:
    """Sample of each token, for four packed samples."""
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


def aux(a_HKT: Tensor, selected_HKT: Tensor) -> float:
    """CP-MoE eq. 12 spelled out."""
    H, K, T = a_HKT.shape
    total = 0.0
    for h in range(H):
        for i in range(K):
            f = sum(bool(selected_HKT[h, i, t]) for t in range(T)) / T
            P = sum(a_HKT[h, i, t].exp() / sum(a_HKT[h, j, t].exp() for j in range(K)) for t in range(T)) / T
            total += f * float(P) / H
    return total


@pytest.mark.parametrize("k", [1, 2, 4])
def test_load_balance_equals_the_equation(k: int) -> None:
    """Counts of the selected tokens times the mean of the softmax over all experts."""
    a_HKT = numbers(2, 4, 7)
    selected_HKT = routing.select(a_HKT, k)
    torch.testing.assert_close(load_balance(a_HKT, selected_HKT).item(), aux(a_HKT, selected_HKT))


def test_a_routing_bias_reaches_f_and_never_p() -> None:
    """A bias that reroutes every token changes the counts; probabilities and gradient are those of native logits."""
    a_HKT = numbers(2, 4, 7).requires_grad_()
    bias_K = torch.tensor([0.0, 50.0, 0.0, 0.0], dtype=torch.float64)
    biased_HKT = routing.select(a_HKT + bias_K[:, None], 1)
    assert biased_HKT[:, 1].all()
    P_HK = a_HKT.softmax(1).mean(-1)
    torch.testing.assert_close(load_balance(a_HKT, biased_HKT), P_HK[:, 1].mean())
    (result,) = torch.autograd.grad(load_balance(a_HKT, biased_HKT), a_HKT)
    (expected,) = torch.autograd.grad(P_HK[:, 1].mean(), a_HKT)
    torch.testing.assert_close(result, expected)


def lbc(gate_KT: Tensor, sample_T: Tensor, types: list[int], delta: float) -> float:
    """LoRAMoE eq. 6-8 spelled out for one head."""
    K = len(gate_KT)
    Z = []
    for n in range(K):
        for m, kind in enumerate(types):
            if kind == NO_TYPE:
                continue
            Q = sum(float(gate_KT[n, j]) for j in range(gate_KT.shape[1]) if sample_T[j] == m)
            expert_type = 0 if n < K // 2 else 1
            Z.append((1 + delta if expert_type == kind else 1 - delta) * Q)
    mean = sum(Z) / len(Z)
    return sum((z - mean) ** 2 for z in Z) / len(Z) / mean


@pytest.mark.parametrize("types", [[0, 1, 1, 0], [0, NO_TYPE, 1, NO_TYPE], [1, NO_TYPE, NO_TYPE, NO_TYPE]])
@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
def test_localized_balance_equals_the_equations(types: list[int], delta: float) -> None:
    """Sums of gates per sample, weighted by the match of types; untyped samples do not count."""
    gate_HKT = numbers(2, 6, sum(LENGTHS)).softmax(1)
    result = localized_balance(gate_HKT, samples(), torch.tensor(types), delta=delta)
    expected = sum(lbc(gate_KT, samples(), types, delta) for gate_KT in gate_HKT) / len(gate_HKT)
    torch.testing.assert_close(result.item(), expected)


@pytest.mark.parametrize(("delta", "own", "other"), [(0.5, 0.125, 0.375), (-0.5, 0.375, 0.125)])
def test_the_minimum_gives_a_type_to_the_other_half_and_with_negative_delta_to_its_own(
    delta: float, own: float, other: float
) -> None:
    """Uniform Z is the minimum, so gates go as 1 / I: the printed sign does the opposite of what the paper intends."""
    logits_KM = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    sample_T, types = torch.arange(2).repeat_interleave(8), torch.tensor([0, 1])
    optimizer = torch.optim.SGD([logits_KM], lr=1.0)
    for _ in range(500):
        optimizer.zero_grad()
        gate_KT = logits_KM.softmax(0).repeat_interleave(8, 1)
        torch.autograd.backward(localized_balance(gate_KT[None], sample_T, types, delta=delta))
        optimizer.step()
    expected_KM = torch.tensor([[own, other], [own, other], [other, own], [other, own]], dtype=torch.float64)
    torch.testing.assert_close(logits_KM.detach().softmax(0), expected_KM, atol=1e-3, rtol=0)


def test_typed_samples_without_tokens_are_balanced() -> None:
    """As records without images in the vision tower: the loss and its gradient are 0, not 0 / 0."""
    gate_HKT = torch.rand(2, 4, 3, requires_grad=True)
    loss = localized_balance(gate_HKT, torch.tensor([1, 1, 1]), torch.tensor([0, NO_TYPE]))
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert gate_HKT.grad is not None
    assert torch.equal(gate_HKT.grad, torch.zeros_like(gate_HKT))


EXAMPLES = random_examples([9, 7, 8], prompt_length=4)
LAYER = AdaptedLayer("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", False, "tokens", 2.0, SHARED)


def decision(tokens: int, seed: int) -> RoutingDecision:
    """A dense decision of one head and four experts."""
    native_HKT = torch.randn(1, 4, tokens, generator=torch.Generator().manual_seed(seed))
    return RoutingDecision(native_HKT, torch.ones(1, 4, tokens, dtype=torch.bool), native_HKT.softmax(1))


def test_losses_are_means_over_the_layers() -> None:
    """The strength times the mean of the layers' terms."""
    packed = pack(EXAMPLES, torch.device("cpu"))
    tokens = packed.input_ids.shape[1]
    layers = [decision(tokens, seed) for seed in range(3)]
    load = LoadBalance(0.5)
    settings = LearnerSettings(sample_types=("a", "b"), localized_delta=-0.3, localized_tau=2.0)
    localized = LocalizedBalance(0.5, packed, ["a", None, "b"], settings)
    for each in layers:
        load(LAYER, each)
        localized(LAYER, each)
    types = torch.tensor([0, -1, 1])
    segment_ids_T = packed.sequences.segment_ids(packed.input_ids.shape[1])
    expected = [
        sum(load_balance(each.native_HKT, each.selected_HKT) for each in layers) / 3,
        sum(
            localized_balance((each.native_HKT / 2.0).softmax(1) * each.selected_HKT, segment_ids_T, types, delta=-0.3)
            for each in layers
        )
        / 3,
    ]
    torch.testing.assert_close([load.loss(), localized.loss()], [0.5 * each for each in expected])


def test_a_decision_about_some_tokens_balances_their_records() -> None:
    """Those of one regime: the term is that of a pass with these records only."""
    packed, some = pack(EXAMPLES, torch.device("cpu")), pack(EXAMPLES[1:], torch.device("cpu"))
    made = decision(some.input_ids.shape[1], seed=0)
    settings = LearnerSettings(sample_types=("a", "b"))
    hook = LocalizedBalance(1.0, packed, ["a", "b", "a"], settings)
    hook(LAYER, replace(made, tokens_T=torch.arange(9, 24), num=packed.input_ids.shape[1]))
    alone = LocalizedBalance(1.0, some, ["b", "a"], settings)
    alone(LAYER, made)
    assert torch.equal(hook.loss(), alone.loss())


def router_gradients(learner: Learner) -> dict[str, Tensor]:
    """Gradients of the routers in one step, before clipping."""
    result: dict[str, Tensor] = {}
    apply = learner.optimizer.step

    def keep(lr: float) -> None:
        result.update({b.name: b.router.grad.clone() for b in learner.banks if b.router is not None})  # type: ignore[union-attr]
        apply(lr)

    learner.optimizer.step = keep  # type: ignore[method-assign]
    learner.step(EXAMPLES, [0] * len(EXAMPLES))
    return result


def test_balance_is_added_to_the_objective_and_not_to_the_reported_loss(make_learner: MakeLearner) -> None:
    """Gamma L_aux changes the routers' gradients; the reported loss is the task loss."""
    with_aux = make_learner(preset="cp-moe", changes={"balance_strength": 5.0}, max_grad_norm=1e9)
    without = make_learner(preset="cp-moe", changes={"balance_strength": 0.0}, max_grad_norm=1e9)
    ones, others = router_gradients(with_aux), router_gradients(without)
    assert any(not torch.equal(ones[name], others[name]) for name in ones)
    losses = [
        make_learner(preset="cp-moe", changes={"balance_strength": gamma}).step(EXAMPLES, [0, 0, 0]).loss
        for gamma in (0.0, 5.0)
    ]
    assert losses[0] == losses[1]


def test_localized_balance_needs_a_sample_type(make_learner: MakeLearner) -> None:
    """Typed samples change the update of `loramoe`; without types the update is the one without the constraint."""
    typed = [
        replace(example, sample_type=name)
        for example, name in zip(EXAMPLES, ("downstream", None, "world_knowledge"), strict=True)
    ]
    plain, constrained, off = (
        make_learner(preset="loramoe", changes={"localized_balance": beta}) for beta in (0.1, 0.1, 0.0)
    )
    plain.step(EXAMPLES)
    off.step(typed)
    constrained.step(typed)
    routers = [
        torch.cat([b.router.flatten() for b in each.banks if b.router is not None])
        for each in (plain, off, constrained)
    ]
    assert torch.equal(routers[0], routers[1])
    assert not torch.equal(routers[0], routers[2])


SETTINGS = LearnerSettings(ffn_steps=2, attention_steps=3)
EXPERTS = frozenset({"q_proj", "up_proj"})


def groups() -> list[Group]:
    made = []
    for seed, name in enumerate(("q_proj", "up_proj", "q_proj.router")):
        torch.manual_seed(seed)
        parameter = Parameter(torch.zeros(1, 2, 3, 4))
        parameter.grad = torch.randn(1, 2, 3, 4)
        parameter.grad[0, 1] = 0.0  # an expert without a token
        made.append(Group(name, {"A": parameter}, None))
    return made


def stages_after(steps: int) -> Stages:
    return Stages(SETTINGS, steps)


def test_stages_follow_each_other() -> None:
    """T1 steps of MLP experts, then T2 - T1 of attention experts, then MLP experts."""
    stages = stages_after(0)
    result = []
    for _ in range(7):
        result.append(stages.stage)
        stages.apply([], EXPERTS)
    assert result == [Stage.FFN] * 2 + [Stage.ATTENTION] * 3 + [Stage.FINE_TUNING] * 2


def test_stage_one_normalizes_each_expert() -> None:
    """Eq. 8: each expert's gradient is divided by its Frobenius norm; a gradient of zero stays zero."""
    _, made, router = groups()
    assert made.parameters["A"].grad is not None
    before = made.parameters["A"].grad.clone()
    stages_after(0).apply([made, router], EXPERTS)
    torch.testing.assert_close(made.parameters["A"].grad[0, 0], before[0, 0] / before[0, 0].norm())
    assert not made.parameters["A"].grad[0, 1].any()
    assert router.parameters["A"].grad is not None
    assert router.parameters["A"].grad.norm() != pytest.approx(1.0)


def test_the_preset_trains_attention_in_stage_two_only(make_learner: MakeLearner) -> None:
    """`mot` on a model: the experts that change in a step of each stage."""
    learner = make_learner(preset="mot", ffn_steps=1, attention_steps=1)
    moved = []
    for step in range(3):
        before = {bank.name: bank.B.detach().clone() for bank in learner.banks}
        learner.step(random_examples([8, 6, 9, 7], prompt_length=3, seed=step))
        different = {
            bank.name.rpartition(".")[2] for bank in learner.banks if not torch.equal(bank.B, before[bank.name])
        }
        moved.append(different)
    learner.hooks.enter(0)
    assert hooks_of(learner).stages == Stages(hooks_of(learner)._settings.learner, 0), "a shift starts them again"
    assert moved == [{"gate_proj", "up_proj", "down_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj"}, moved[0]]


@pytest.mark.parametrize("accumulation", ["sum", "per_regime"])
def test_importance_is_of_the_gradients_before_a_stage_normalizes_them(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, accumulation: str
) -> None:
    """Stage I changes the update and not what importance is computed from; experts that it freezes have none."""
    changes = {"anchor_strength": 1.0, "accumulation": accumulation}
    learner = make_learner(preset="mot", changes=changes, ffn_steps=1, attention_steps=1, max_grad_norm=1e-3)
    hooks = hooks_of(learner)
    assert hooks.path is not None
    assert hooks.stages is not None
    plain: dict[str, Tensor] = {}
    apply, after = hooks.stages.apply, hooks.path.after

    def keep(given: Sequence[Group], experts: frozenset[str]) -> None:
        plain.update({g.name: g.parameters["B"].grad.clone() for g in given if g.name in experts})  # type: ignore[union-attr]
        apply(given, experts)

    result: dict[str, Tensor | None] = {}

    def receive(gradients: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        result.update(zip([bank.name for bank in learner.banks], gradients[1::2], strict=True))
        after(gradients, scale=scale)

    monkeypatch.setattr(hooks.stages, "apply", keep)
    monkeypatch.setattr(hooks.path, "after", receive)
    for frozen in (True, False, True):  # the attention experts
        learner.step(random_examples([8, 6, 9, 7], prompt_length=3))
        for name, gradient in result.items():
            if ("self_attn" in name) == frozen:
                assert gradient is None
            else:
                assert gradient is not None
                assert torch.equal(gradient, plain[name])
