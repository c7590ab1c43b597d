"""Computing only the experts that a pass may use changes no result."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamlearn.adapters import HeadLoraConfig, HeadLoraLinear
from streamlearn.adapters.routing_context import RoutingContext, RoutingContextHolder
from streamlearn.adapters.usable import MARGIN, UsableExperts, rows, take

CLAIMS = HeadLoraConfig(num_heads=4, num_experts=5, top_k=1, regimes=4)
VARIANTS = {
    "one claim": (CLAIMS, 1),
    "two claims": (CLAIMS, 2),
    "one claim, native gate": (replace(CLAIMS, router_gradient="native"), 1),
    "two of three claims": (replace(CLAIMS, top_k=2, router_gradient="selected"), 3),
    "two selected of one claim": (replace(CLAIMS, top_k=2, router_gradient="selected"), 1),
    "whole sequences": (replace(CLAIMS, num_heads=1, routes="sequences"), 1),
    "softmax over all": (replace(CLAIMS, top_k=None, gate="softmax", router_gradient="native"), 2),
}
SLOTS = {"one regime": [2, 2, 2], "two regimes": [0, 2, 0], "a regime without claims": [0, 3, 3]}
LENGTH = 4


def layer(config: HeadLoraConfig, claims: int) -> HeadLoraLinear:
    """A layer whose regimes 0 to 2 have claimed experts at random; regime 3 has no claims."""
    generator = torch.Generator().manual_seed(3)
    base = nn.Linear(24, 10).requires_grad_(False)
    made = HeadLoraLinear(base)
    made.update_layer("default", config, generator, RoutingContextHolder())
    nn.init.normal_(made.head_lora_B["default"], generator=generator)
    made.head_lora_bias["default"][:, :, :3] = -MARGIN
    for slot in range(3):
        chosen = torch.rand(config.num_heads, 5, generator=generator).topk(claims, dim=1).indices
        made.head_lora_bias["default"][:, :, slot].scatter_(1, chosen, 0.0)
    return made.to(torch.float64)


def outcome(made: HeadLoraLinear, slots: list[int], hooks: tuple[Any, ...]) -> dict[str, Tensor]:
    """Output, gradients (zero for none) and load of a training pass."""
    made.zero_grad()
    made.reset_load()
    x = torch.randn(len(slots) * LENGTH, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x.requires_grad_()
    segment_ids = torch.arange(len(slots)).repeat_interleave(LENGTH)
    made.context_holder.context = RoutingContext(segment_ids, torch.tensor(slots), hooks=hooks)
    y = made(x)
    y.mul(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    parameters = {name: p for name, p in made.named_parameters() if p.requires_grad}
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in {"x": x, **parameters}.items()}
    return {"y": y.detach(), "load": made.head_lora_load["default"].clone(), **found}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=list(SLOTS))
@pytest.mark.parametrize(("config", "claims"), VARIANTS.values(), ids=list(VARIANTS))
def test_excluded_experts_are_not_missed(config: HeadLoraConfig, claims: int, slots: list[int]) -> None:
    """A hook makes the layer compute every expert."""
    made = layer(config, claims)
    expected = outcome(made, slots, hooks=(lambda *_: None,))
    found = outcome(made, slots, hooks=())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert found["load"].sum() > 0


@pytest.mark.parametrize(("slots", "usable"), [([2], 1), ([0, 2], 2), ([0, 1, 2], 3), ([3], None), ([0, 3], None)])
def test_a_pass_computes_what_its_regimes_claimed(slots: list[int], usable: int | None) -> None:
    """Each head has up to one expert for each regime; a regime without claims uses all."""
    made = layer(CLAIMS, 1)
    found = UsableExperts().of(made.head_lora_bias["default"], tuple(slots), 1)
    if usable is None:
        assert found is None
        return
    assert found is not None
    assert found.shape[1] <= usable
    assert (found.diff(dim=1) > 0).all(), "ascending, so that the first of equal logits stays the first"
    allowed_HK = (made.head_lora_bias["default"][:, :, slots] == 0).any(2)
    computed_HK = torch.zeros(4, 5, dtype=torch.bool)
    computed_HK[rows(found), found] = True
    assert not (allowed_HK & ~computed_HK).any()


def test_a_changed_bias_is_read_again() -> None:
    """In place, as a shift changes it, and under weights that are swapped in, as an evaluation job does."""
    bias = torch.tensor([[[0.0], [-MARGIN], [-MARGIN]]])
    usable = UsableExperts()
    first = usable.of(bias, (0,), 1)
    assert first is not None
    assert first.tolist() == [[0]]
    bias[0, :, 0] = torch.tensor([-MARGIN, 0.0, -MARGIN])
    second = usable.of(bias, (0,), 1)
    assert second is not None
    assert second.tolist() == [[1]]
    live = bias.data
    bias.data = torch.tensor([[[-MARGIN], [-MARGIN], [0.0]]])
    pinned = usable.of(bias, (0,), 1)
    assert pinned is not None
    assert pinned.tolist() == [[2]]
    bias.data = live
    again = usable.of(bias, (0,), 1)
    assert again is not None
    assert again.tolist() == [[1]]


def test_taking_none_is_taking_all() -> None:
    """Without a restriction nothing is copied."""
    values = torch.randn(2, 3, 4)
    assert take(values, None) is values
    torch.testing.assert_close(take(values, torch.tensor([[2], [0]])), torch.stack([values[0, 2:], values[1, :1]]))
