"""Adapters that belong to one regime each, and records without a regime."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from streamlearn.adapters.context import NO_REGIME, RoutingContext, RoutingContextHolder, Sequences, routing_context
from streamlearn.adapters.layer import HeadLoraLinear
from streamlearn.adapters.presets import HeadLoraConfig, regime_adapter
from streamlearn.adapters.tuner import add_regime, attach, delete_adapter
from streamlearn.backbone.load import load, outline
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack
from streamlearn.settings import BackboneSettings
from streamlearn.stream.record import Prompt
from tests.doubles import random_examples
from tests.learner.reference import train
from tests.learners import MakeLearner

OWN = HeadLoraConfig(num_heads=4, num_experts=1, per_regime=True)

ROUTED = HeadLoraConfig(num_heads=4, num_experts=3, per_regime=True)

LENGTHS = (5, 3, 4, 1)


def layer(config: HeadLoraConfig, regimes: int = 3) -> HeadLoraLinear:
    """A layer with an adapter for each regime, with B different from zero."""
    generator = torch.Generator().manual_seed(3)
    made = HeadLoraLinear(nn.Linear(24, 10).requires_grad_(False))
    holder = RoutingContextHolder()
    for slot in range(regimes):
        made.update_layer(regime_adapter(slot), config, generator, holder)
        nn.init.normal_(made.head_lora_B[regime_adapter(slot)], generator=generator)
    return made.to(torch.float64)


def run(made: HeadLoraLinear, x: Tensor, slots: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Output, and the gradients of x and of every weight; zero for a weight without one."""
    x = x.detach().requires_grad_()
    made.context_holder.context = RoutingContext(Sequences(lengths=tuple(lengths), slots=tuple(slots)))
    y = made(x)
    inputs = [x, *(p for p in made.parameters() if p.requires_grad)]
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x).sum(1)  # each token has its own
    result = torch.autograd.grad((y * weights[:, None]).sum(), inputs, allow_unused=True)
    return y.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(inputs, result, strict=True)]


@pytest.mark.parametrize("config", [OWN, ROUTED], ids=["one expert", "tokens choose among three"])
@pytest.mark.parametrize("slots", [(1, 1, 1, 1), (2, 7, 0, -1)], ids=["one", "mixed"])
def test_a_mixed_pass_equals_one_pass_for_each_record(config: HeadLoraConfig, slots: tuple[int, ...]) -> None:
    """Outputs and gradients; a regime without an adapter gets the frozen linear, bit for bit."""
    made = layer(config)
    x = torch.randn(sum(LENGTHS), 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y, gradients = run(made, x, slots, LENGTHS)
    expected: list[Tensor] = []
    for slot, part in zip(slots, torch.split(x, list(LENGTHS)), strict=True):
        made.context_holder.context = RoutingContext(Sequences(lengths=(len(part),), slots=(slot,)))
        expected.append(made(part))
        if slot not in range(3):
            assert torch.equal(expected[-1], made.base_layer(part))
    torch.testing.assert_close(y, torch.cat(expected).detach())
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x).sum(1)
    total = (torch.cat(expected) * weights[:, None]).sum()
    parameters = [p for p in made.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(total, parameters, allow_unused=True)
    for parameter, gradient, each in zip(parameters, gradients[1:], wanted, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(parameter) if each is None else each)


@pytest.mark.parametrize("config", [OWN, ROUTED], ids=["one expert", "tokens choose among three"])
def test_a_sequence_may_have_the_mean_of_adapters(config: HeadLoraConfig) -> None:
    """Half the mean of what each adds, of those that exist; other sequences of the pass are not touched by it."""
    made = layer(config)
    x = torch.randn(sum(LENGTHS), 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    parts = torch.split(x, list(LENGTHS))

    def added(slot: int, part: Tensor) -> Tensor:
        made.context_holder.context = RoutingContext(Sequences(slots=(slot,)))
        y: Tensor = made(part[None]) - made.base_layer(part[None])
        return y[0]

    expected = [added(1, parts[0]), (added(0, parts[1]) + added(2, parts[1])) / 4, 0 * added(0, parts[2])]
    expected.append(added(1, parts[3]) / 2)
    sequences = Sequences(lengths=tuple(LENGTHS), slots=(1, (0, 2), NO_REGIME, (1, 7)))
    made.context_holder.context = RoutingContext(sequences)
    torch.testing.assert_close(made(x) - made.base_layer(x), torch.cat(expected))


@pytest.fixture
def model(tiny: Path) -> PeftModel:
    settings = BackboneSettings(model=str(tiny), dtype="float32", device="cpu")
    made = attach(
        load(settings, outline(settings)).model, HeadLoraConfig(num_heads=4, num_experts=1, per_regime=True), 0
    )
    for slot in range(3):
        add_regime(made, slot, seed=slot)
    return made


@pytest.mark.parametrize("router_gradient", ["none", "straight_through"])
def test_the_routers_of_every_regime_are_frozen_without_a_gradient(tiny: Path, router_gradient: Any) -> None:
    """Also those of regimes that are added or replaced later, and after the active adapter was deleted."""
    settings = BackboneSettings(model=str(tiny), dtype="float32", device="cpu")
    config = HeadLoraConfig(num_heads=4, num_experts=2, router_gradient=router_gradient, per_regime=True)
    made = attach(load(settings, outline(settings)).model, config, 0)
    for slot in (1, 2, 1):
        add_regime(made, slot, seed=slot)
    for left in ({0, 1, 2}, {1, 2}):
        routers = {name: p.requires_grad for name, p in made.named_parameters() if "head_lora_router" in name}
        assert {name.rpartition(".")[2] for name in routers} == {regime_adapter(slot) for slot in left}
        assert set(routers.values()) == {router_gradient != "none"}
        assert all(p.requires_grad for name, p in made.named_parameters() if "head_lora_A" in name)
        delete_adapter(made, regime_adapter(min(left)))


def test_a_regime_is_a_peft_folder(model: PeftModel, tiny: Path, tmp_path: Path) -> None:
    """`save_pretrained` writes one folder for each regime; each loads by itself and gives the same logits."""
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    model.save_pretrained(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {regime_adapter(slot) for slot in range(3)}
    ids = torch.arange(6)[None]
    with torch.no_grad(), routing_context(model, RoutingContext(Sequences(slots=(1,)))):
        expected = model(ids).logits
    settings = BackboneSettings(model=str(tiny), dtype="float32", device="cpu")
    alone = PeftModel.from_pretrained(load(settings, outline(settings)).model, str(tmp_path / regime_adapter(1)))
    with torch.no_grad():
        assert torch.equal(alone(ids).logits, expected)


PRESETS = ["streamlearn", "cp-moe", "mot"]

LENGTH = 4

EXAMPLES = random_examples([9, 7, 8, 6], prompt_length=4)


@pytest.fixture(params=PRESETS)
def trained(make_learner: MakeLearner, request: pytest.FixtureRequest) -> Learner:
    """A learner whose adapter has an effect."""
    learner = make_learner(preset=request.param, lr=3e-2)
    train(learner, range(4))
    return learner


def logits(learner: Learner, slots: list[int] | None) -> Tensor:
    """Of the packed examples."""
    packed = pack(EXAMPLES, learner.device, slots)
    with torch.no_grad(), routing_context(learner.model, packed.context()):
        result: Tensor = learner.forward(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            records=packed.records,
            use_cache=False,
        ).logits[0]
    return result


SHARED = HeadLoraConfig(num_heads=4, num_experts=5, regimes=4)

CONFIGS = {
    "biased": SHARED,
    "two selected": replace(SHARED, top_k=2, router_gradient="selected"),
    "whole sequences": replace(SHARED, num_heads=1, routes="sequences"),
    "softmax over all": replace(SHARED, top_k=None, gate="softmax", router_gradient="native"),
    "no router": HeadLoraConfig(num_heads=1, num_experts=1, top_k=None, gate="none", router_gradient="none"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("slots", [[0, NO_REGIME, 2], [NO_REGIME] * 3])
def test_its_tokens_keep_the_linears_output(config: HeadLoraConfig, slots: list[int]) -> None:
    """Exactly, also beside experts that all regimes share; the tokens of the others are those of a pass without it."""
    generator = torch.Generator().manual_seed(3)
    made = HeadLoraLinear(torch.nn.Linear(24, 10).requires_grad_(False))
    made.update_layer("default", config, generator, RoutingContextHolder())
    torch.nn.init.normal_(made.head_lora_B["default"], generator=generator)
    if config.regimes:
        torch.nn.init.normal_(made.head_lora_bias["default"], generator=generator)
    made.to(torch.float64)
    x = torch.randn(len(slots) * LENGTH, 24, generator=generator, dtype=torch.float64)
    segment_ids = torch.arange(len(slots)).repeat_interleave(LENGTH)
    made.context_holder.context = RoutingContext(Sequences(lengths=(LENGTH,) * len(slots), slots=tuple(slots)))
    with torch.no_grad():
        result, frozen = made(x), made.base_layer(x)
        for number, slot in enumerate(slots):
            own = segment_ids == number
            if slot == NO_REGIME:
                assert torch.equal(result[own], frozen[own])
                continue
            made.context_holder.context = RoutingContext(Sequences(lengths=(LENGTH,), slots=(slot,)))
            torch.testing.assert_close(result[own], made(x[own]))
            assert not torch.equal(result[own], frozen[own])


def test_in_a_mixed_batch_it_has_the_backbones_logits(trained: Learner) -> None:
    """And the others have their own."""
    with trained.model.disable_adapter():
        frozen = logits(trained, None)
    adapted = logits(trained, [0] * 4)
    result = logits(trained, [0, NO_REGIME, 0, NO_REGIME])
    expected = torch.cat([adapted[:9], frozen[9:16], adapted[16:24], frozen[24:]])
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_texts_without_a_regime_are_the_backbones(trained: Learner) -> None:
    """Decoded together with others, which end earlier and later."""
    prompts = [Prompt(each.input_ids.tolist()) for each in EXAMPLES]

    def texts(slots: list[int], limits: list[int]) -> list[list[int]]:
        work = decode(trained.model, prompts, limits, frozenset(), trained.device, slots)
        return run_to_end(work)

    with trained.model.disable_adapter():
        frozen = texts([0] * 4, [8] * 4)
    adapted = texts([0] * 4, [8] * 4)
    assert frozen != adapted
    assert texts([NO_REGIME] * 4, [8] * 4) == frozen
    result = texts([0, NO_REGIME, NO_REGIME, 0], [2, 8, 3, 4])
    assert result == [adapted[0][:2], frozen[1], frozen[2][:3], adapted[3][:4]]
