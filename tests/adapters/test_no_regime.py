"""Sequences without a regime are computed by the untouched backbone, alone and beside others."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamlearn.adapters import HeadLoraConfig, HeadLoraLinear
from streamlearn.adapters.context import NO_REGIME, RoutingContext, RoutingContextHolder, Sequences, routing_context
from streamlearn.learner.evaluate import ExampleScore, run_to_end, score
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack
from streamlearn.stream.record import Prompt
from tests.doubles import random_examples
from tests.learner.reference import train
from tests.learners import MakeLearner

PRESETS = ["streamlearn", "cp-moe", "mot", "lora", "loramoe"]
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
        found: Tensor = learner.forward(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            records=packed.records,
            use_cache=False,
        ).logits[0]
    return found


def scores(learner: Learner, slots: list[int]) -> list[ExampleScore]:
    return run_to_end(score(learner.model, EXAMPLES, learner.device, pack_tokens=64, slots=slots))


SHARED = HeadLoraConfig(num_heads=4, num_experts=5, regimes=4)
CONFIGS = {
    "biased": SHARED,
    "two selected": replace(SHARED, top_k=2, router_gradient="selected"),
    "whole sequences": replace(SHARED, num_heads=1, routes="sequences"),
    "softmax over all": replace(SHARED, top_k=None, gate="softmax", router_gradient="native"),
    "no router": HeadLoraConfig(num_heads=1, num_experts=1, top_k=None, gate="none", router_gradient="none"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("slots", [[NO_REGIME, 2, NO_REGIME], [0, NO_REGIME, 2], [NO_REGIME] * 3])
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
        found, frozen = made(x), made.base_layer(x)
        for number, slot in enumerate(slots):
            own = segment_ids == number
            if slot == NO_REGIME:
                assert torch.equal(found[own], frozen[own])
                continue
            made.context_holder.context = RoutingContext(Sequences(lengths=(LENGTH,), slots=(slot,)))
            torch.testing.assert_close(found[own], made(x[own]))
            assert not torch.equal(found[own], frozen[own])


def test_alone_it_has_the_backbones_logits(trained: Learner) -> None:
    """Bit for bit."""
    with trained.model.disable_adapter():
        expected = logits(trained, None)
    assert torch.equal(logits(trained, [NO_REGIME] * 4), expected)
    assert not torch.equal(logits(trained, [0] * 4), expected)


def test_in_a_mixed_batch_it_has_the_backbones_logits(trained: Learner) -> None:
    """And the others have their own."""
    with trained.model.disable_adapter():
        frozen = logits(trained, None)
    adapted = logits(trained, [0] * 4)
    found = logits(trained, [0, NO_REGIME, 0, NO_REGIME])
    expected = torch.cat([adapted[:9], frozen[9:16], adapted[16:24], frozen[24:]])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_scoring_without_a_regime_is_scoring_the_backbone(trained: Learner) -> None:
    """In the packed batches of an evaluation."""
    with trained.model.disable_adapter():
        expected = scores(trained, [0] * 4)
    assert scores(trained, [NO_REGIME] * 4) == expected


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
    found = texts([0, NO_REGIME, NO_REGIME, 0], [2, 8, 3, 4])
    assert found == [adapted[0][:2], frozen[1], frozen[2][:3], adapted[3][:4]]
