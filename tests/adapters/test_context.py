"""Routing contexts: what routes one forward pass, and that no state of it outlives the pass."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from streamlearn.adapters.context import (
    AdaptedLayer,
    RoutingContext,
    RoutingDecision,
    routing_context,
)
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.stream.record import Example
from tests.doubles import random_examples
from tests.learners import MakeLearner

EXAMPLES = random_examples([9, 7, 8], prompt_length=4)


class Recorder:
    """A routing hook that keeps every layer's decision."""

    def __init__(self) -> None:
        self.layers: list[AdaptedLayer] = []
        self.decisions: list[RoutingDecision] = []

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        self.layers.append(layer)
        self.decisions.append(decision)


def recorded(
    learner: Learner, examples: Sequence[Example], slots: Sequence[int] | None, *, explore: bool = False
) -> Recorder:
    recorder = Recorder()
    packed = pack(examples, learner.device, slots)
    with torch.no_grad(), routing_context(learner.model, packed.context(explore=explore, hooks=(recorder,))):
        packed_loss(learner.forward, packed)
    return recorder


def decisions(
    learner: Learner, examples: Sequence[Example], slots: Sequence[int] | None, *, explore: bool = False
) -> list[RoutingDecision]:
    return recorded(learner, examples, slots, explore=explore).decisions


def favour(learner: Learner, slot: int, expert: int, strength: float = 50.0) -> None:
    for bank in learner.banks:
        assert bank.bias_HKN is not None
        bank.bias_HKN[:, expert, slot] = strength


def test_each_record_is_routed_with_its_own_regimes_bias(make_learner: MakeLearner) -> None:
    """Two regimes in one packed batch: the tokens of each record go where its own bias sends them."""
    learner = make_learner(preset="cp-moe")
    favour(learner, 1, 2)
    favour(learner, 3, 0)
    first = decisions(learner, EXAMPLES, [1, 3, 0])[0]
    assert first.selected_HKT[:, 2, :9].all()
    assert first.selected_HKT[:, 0, 9:16].all()
    plain = decisions(learner, EXAMPLES, [0, 0, 0])[0]
    assert torch.equal(first.selected_HKT[:, :, 16:], plain.selected_HKT[:, :, 16:])


def test_the_bias_leaves_native_logits_alone(make_learner: MakeLearner) -> None:
    """In the first layer, whose input does not depend on any adapter, the logits are bit-equal (CP-MoE eq. 12)."""
    learner = make_learner(preset="cp-moe")
    plain = decisions(learner, EXAMPLES, [1, 1, 1])[0].native_HKT
    favour(learner, 1, 2)
    biased = decisions(learner, EXAMPLES, [1, 1, 1])[0]
    assert torch.equal(biased.native_HKT, plain)
    assert biased.selected_HKT[:, 2].all()


def test_a_bias_does_not_outlive_its_forward_pass(make_learner: MakeLearner) -> None:
    """An unbiased pass after a biased one routes like one before it, also when the biased one failed."""
    learner = make_learner(preset="cp-moe")
    before = decisions(learner, EXAMPLES, None)[0].selected_HKT
    favour(learner, 1, 2)
    decisions(learner, EXAMPLES, [1, 1, 1])
    assert torch.equal(decisions(learner, EXAMPLES, None)[0].selected_HKT, before)
    context = pack(EXAMPLES, learner.device, [1, 1, 1]).context()
    with pytest.raises(KeyError), routing_context(learner.model, context):
        raise KeyError
    assert learner.model.base_model.context_holder.context is not context


def test_sequences_are_routed_whole_and_by_their_prompt_only(make_learner: MakeLearner) -> None:
    """`mot`: all tokens of a record and all linears of a block share one decision, which answers do not change."""
    learner = make_learner(preset="mot")
    result = decisions(learner, EXAMPLES, None)
    assert len(result) == 2  # one gate per block
    assert all(each.selected_HKT.shape == (1, 8, 3) for each in result)
    changed = [
        replace(example, input_ids=example.input_ids.copy(), labels=example.labels.copy()) for example in EXAMPLES
    ]
    for example in changed:
        example.input_ids[4:] = 20
        example.labels[4:] = 20
    torch.testing.assert_close(decisions(learner, changed, None)[0].native_HKT, result[0].native_HKT)


def test_exploration_noise_is_for_training(make_learner: MakeLearner) -> None:
    """MoT eq. 1: with noise, decisions differ between passes; without it they do not."""
    learner = make_learner(preset="mot")
    for bank in learner.banks:
        bank.layer.head_lora_config["default"].noise = 100.0
    torch.manual_seed(0)

    def selections(*, explore: bool) -> set[tuple[bool, ...]]:
        passes = (decisions(learner, EXAMPLES, None, explore=explore)[0] for _ in range(8))
        return {tuple(each.selected_HKT.flatten().tolist()) for each in passes}

    assert len(selections(explore=True)) > 1
    assert len(selections(explore=False)) == 1


def test_a_sequence_keeps_its_experts_while_it_is_decoded(make_learner: MakeLearner) -> None:
    """The pass over the prompt decides; later tokens use its decision."""
    learner = make_learner(preset="mot")
    recorder = Recorder()
    context = RoutingContext(decoding=True, hooks=(recorder,))
    ids = torch.from_numpy(np.stack([EXAMPLES[0].input_ids, EXAMPLES[0].input_ids[::-1]])).long()
    with torch.no_grad(), routing_context(learner.model, context):
        learner.forward(input_ids=ids, use_cache=False)
        chosen = {block: decision.selected_HKT.clone() for block, decision in context.block_decisions.items()}
        learner.forward(input_ids=ids[:, :1], use_cache=False)
    assert len(recorder.decisions) == 2
    assert all(torch.equal(context.block_decisions[block].selected_HKT, chosen[block]) for block in chosen)
