"""The layer, its routing and its matrix products against their equations."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from streamlearn.adapters import layer as routing
from streamlearn.adapters.bottleneck import add_experts
from streamlearn.adapters.context import RoutingContext, RoutingContextHolder
from streamlearn.adapters.layer import HeadLoraLinear
from streamlearn.adapters.presets import HeadLoraConfig
from tests.adapters import reference

MH_MOE = HeadLoraConfig(num_heads=4, num_experts=3, top_k=1)

VARIANTS = {
    "mh-moe": MH_MOE,
    "native": replace(MH_MOE, router_gradient="native"),
    "frozen router": replace(MH_MOE, router_gradient="none"),
    "two of three": replace(MH_MOE, top_k=2),
    "two of three, their own gradient": replace(MH_MOE, top_k=2, router_gradient="selected"),
    "all": replace(MH_MOE, top_k=None),
    "loramoe": HeadLoraConfig(
        num_heads=1, num_experts=6, top_k=None, gate="softmax", router_gradient="native", alpha=32
    ),
    "lora": HeadLoraConfig(num_heads=1, num_experts=1, top_k=None, gate="none", router_gradient="none", r=5),
}


def layer(config: HeadLoraConfig, dtype: torch.dtype = torch.float64, **shape: Any) -> HeadLoraLinear:
    """A layer as `attach` makes it, but with B different from zero."""
    generator = torch.Generator().manual_seed(3)
    base = nn.Linear(shape.get("D", 24), shape.get("O", 10)).requires_grad_(False)
    nn.init.normal_(base.weight, generator=generator)
    made = HeadLoraLinear(base)
    made.update_layer("default", config, generator, RoutingContextHolder())
    nn.init.normal_(made.head_lora_B["default"], generator=generator)
    return made.to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=dtype).requires_grad_()


def gradients(made: HeadLoraLinear, x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
    inputs = {"x": x} | {name: p for name, p in made.named_parameters() if p.requires_grad}
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    result = torch.autograd.grad((y * weights).sum(), list(inputs.values()), allow_unused=True)
    return dict(zip(inputs, result, strict=True))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=list(VARIANTS))
def test_equals_the_loop_over_the_papers_equations(config: HeadLoraConfig) -> None:
    """Stacked products give eq. 12-16, and their hand-written backward passes its gradients, in float64."""
    made, x = layer(config), tokens(7, 24)
    if config.router_gradient == "none" and config.routed:
        made.head_lora_router["default"].requires_grad_(False)
    A, B, router = (
        parameters.get("default") for parameters in (made.head_lora_A, made.head_lora_B, made.head_lora_router)
    )
    assert A is not None
    assert B is not None
    expected = reference.forward(x, made.base_layer(x), A, B, router, config)
    result = made(x)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradients(made, x, result), gradients(made, x, expected))


@settings(deadline=None, max_examples=30)
@given(
    heads=st.sampled_from([1, 2, 3, 6]),
    experts=st.integers(1, 5),
    rank=st.integers(1, 4),
    t=st.integers(1, 6),
    data=st.data(),
)
def test_equals_the_reference_for_any_shape(heads: int, experts: int, rank: int, t: int, data: st.DataObject) -> None:
    """Any heads, experts, rank, top-k and number of tokens."""
    top_k = data.draw(st.integers(1, experts))
    config = HeadLoraConfig(num_heads=heads, num_experts=experts, top_k=top_k, r=rank)
    made, x = layer(config, D=12, O=5), tokens(t, 12)
    A, B = made.head_lora_A["default"], made.head_lora_B["default"]
    router = made.head_lora_router["default"] if experts > 1 else None
    torch.testing.assert_close(made(x), reference.forward(x, made.base_layer(x), A, B, router, config))


def test_an_unchosen_expert_gets_a_gradient_of_exactly_zero() -> None:
    """Exactly, not approximately."""
    made, x = layer(MH_MOE), tokens(2, 24)  # two tokens leave at least one of three experts per head without a token
    result = gradients(made, x, made(x))
    routed = made.head_lora_load["default"] > 0
    assert not routed.all()
    for name in ("head_lora_A.default", "head_lora_B.default"):
        gradient = result[name]
        assert gradient is not None
        assert (gradient[~routed] == 0).all()
        assert (gradient[routed] != 0).any(-1).all()


def test_works_under_bf16_autocast() -> None:
    """Products run in bf16 like the linear; weights and gradients of the experts are float32."""
    made, x = layer(MH_MOE, dtype=torch.float32), tokens(2, 6, 24, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = made(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), made(x), rtol=0.05, atol=0.5)
    result = gradients(made, x, y)
    assert {g.dtype for g in result.values() if g is not None} == {torch.float32}


def test_counts_tokens_in_training_passes_only() -> None:
    """Evaluation does not count; several training passes add up; a reset sets the load to zero."""
    made = layer(MH_MOE)
    load = made.head_lora_load["default"]
    with torch.no_grad():
        made(tokens(50, 24))
    assert not load.any()
    made(tokens(1, 24))
    assert load.sum(1).tolist() == [1, 1, 1, 1]
    made(-tokens(1, 24))  # the opposite token selects another expert
    assert (load > 0).sum(1).tolist() == [2, 2, 2, 2]
    made(tokens(7, 24))
    assert load.sum(1).tolist() == [9, 9, 9, 9]


@given(st.lists(st.sampled_from([0.0, 1.0, -1.0]), min_size=5, max_size=5), st.integers(1, 5))
def test_exactly_k_are_selected_also_under_ties(values: list[float], k: int) -> None:
    """Equal logits never select more or fewer than k."""
    selected = routing.select(torch.tensor(values).view(1, 5, 1), k)
    assert selected.sum() == k
    assert min(v for v, s in zip(values, selected.flatten(), strict=True) if s) >= sorted(values)[-k]


def test_logits_are_float32_beside_bf16_tokens() -> None:
    """Two experts whose logits bf16 would tie keep their order, also under autocast."""
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    router = torch.tensor([[[1.0, 1.0], [1.0, 1.001]]])
    with torch.autocast("cpu", torch.bfloat16):
        a = routing.logits(x, router)
    assert a.dtype == torch.float32
    assert routing.select(a, 1).flatten().tolist() == [False, True]


def test_a_training_pass_drops_inputs_of_experts_only() -> None:
    """LoRA's dropout: the frozen linear and the router read the whole input, and so do all other passes."""
    made, x = layer(replace(MH_MOE, dropout=0.4)), tokens(7, 24)
    plain = deepcopy(made)
    plain.head_lora_config["default"] = MH_MOE
    assert torch.equal(made(x), plain(x))
    gate_HKT = plain.route("default", x)
    with made.context_holder.using(RoutingContext(explore=True)):
        torch.manual_seed(3)
        result = made(x)
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(x, 0.4)
    A, B = made.head_lora_A["default"], made.head_lora_B["default"]
    expected = add_experts(made.base_layer(x).clone(), dropped, A, B, gate_HKT, scaling=MH_MOE.scaling)
    torch.testing.assert_close(result, expected)
    assert not torch.equal(result, plain(x))
