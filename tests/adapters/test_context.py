"""Routing contexts: what routes one forward pass, and that no state of it outlives the pass."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from streamlearn.adapters.context import (
    NO_REGIME,
    AdaptedLayer,
    RoutingContext,
    RoutingDecision,
    Sequences,
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


@pytest.mark.parametrize("preset", ["mh-moe", "mot"])
def test_hooks_get_a_description_of_each_routed_layer(make_learner: MakeLearner, preset: str) -> None:
    """Names are those of the banks; the block is the layer itself, or the transformer block for sequence routing."""
    learner = make_learner(preset=preset)
    routed = [bank for bank in learner.banks if bank.router is not None]
    found = recorded(learner, EXAMPLES, None).layers
    assert [layer.name for layer in found] == [bank.name for bank in routed]
    config = learner.banks[0].layer.head_lora_config["default"]
    for layer, bank in zip(found, routed, strict=True):
        assert layer == bank.info
        assert (layer.routes, layer.scaling, layer.is_vision) == (config.routes, config.scaling, False)
        assert layer.block == (bank.name if preset == "mh-moe" else ".".join(bank.name.split(".")[:3]))


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
    found = decisions(learner, EXAMPLES, None)
    assert len(found) == 2  # one gate per block
    assert all(each.selected_HKT.shape == (1, 8, 3) for each in found)
    changed = [
        replace(example, input_ids=example.input_ids.copy(), labels=example.labels.copy()) for example in EXAMPLES
    ]
    for example in changed:
        example.input_ids[4:] = 20
        example.labels[4:] = 20
    torch.testing.assert_close(decisions(learner, changed, None)[0].native_HKT, found[0].native_HKT)


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


def test_tokens_and_sequences_have_the_slot_of_their_record() -> None:
    """Per token by length, or by input row without lengths; per sequence as given; None without regimes."""
    packed = Sequences(lengths=(2, 1, 2), slots=(5, 3, 7))
    for _ in range(2):  # made once, and again the same
        slots_T = packed.slots_of(5, per_token=True)
        assert slots_T is not None
        assert slots_T.tolist() == [5, 5, 3, 7, 7]
    assert packed.slots_of(5, per_token=True) is slots_T
    slots_B = packed.slots_of(3, per_token=False)
    assert slots_B is not None
    assert slots_B.tolist() == [5, 3, 7]
    padded = Sequences(slots=(5, 3)).slots_of(6, per_token=True)
    assert padded is not None
    assert padded.tolist() == [5, 5, 5, 3, 3, 3]
    assert Sequences(lengths=(2, 4)).slots_of(6, per_token=True) is None


def test_what_adapts_the_sequences_is_listed_once() -> None:
    """Means stand for their adapters; the untouched backbone is nothing that adapts."""
    sequences = Sequences(lengths=(1, 2, 1, 3, 1), slots=(4, (2, 4), NO_REGIME, 4, (2, 4)))
    assert sequences.distinct == (4, (2, 4))
    assert sequences.adapted_slots == (4, 2)
    tokens = sequences.tokens_of((2, 4), 8, is_vision=False)
    assert tokens is not None
    assert tokens.tolist() == [1, 2, 7]
    adapted = sequences.tokens_with_regime(8, is_vision=False)
    assert adapted is not None
    assert adapted.tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_one_regime_for_all_needs_no_indices() -> None:
    """Neither does a pass without regimes."""
    alone = Sequences(lengths=(1, 2), slots=(3, 3))
    assert alone.tokens_of(3, 3, is_vision=False) is None
    assert alone.tokens_with_regime(3, is_vision=False) is None
    assert Sequences(lengths=(1, 2)).tokens_with_regime(3, is_vision=False) is None
    assert Sequences(slots=(NO_REGIME,)).distinct == ()


@pytest.mark.parametrize(("num", "expected"), [(3, [1, 3, 3]), (6, [1, 1, 3, 3, 3, 3])])
def test_vision_tokens_belong_to_the_records_with_the_images(num: int, expected: list[int]) -> None:
    """One image in the second record, two in the fourth, for any number of tokens per image."""
    sequences = Sequences(lengths=(5, 5, 5, 5), slots=(4, 5, 6, NO_REGIME), vision_units=(0, 1, 0, 2))
    assert sequences.segment_ids(num, is_vision=True).tolist() == expected
    slots = sequences.slots_of(num, per_token=True, is_vision=True)
    assert slots is not None
    assert slots.tolist() == [5 if record == 1 else NO_REGIME for record in expected]
    tokens = sequences.tokens_with_regime(num, is_vision=True)
    assert tokens is not None
    assert tokens.tolist() == [i for i, record in enumerate(expected) if record == 1]


def test_rows_that_are_decoded_keep_what_adapts_them() -> None:
    """One token of each at a time; images were read with the prompts."""
    read = Sequences(lengths=(4, 2, 3), slots=(1, (0, 2), NO_REGIME), vision_units=(1, 0, 0))
    assert read.of_rows([0, 2]) == Sequences(lengths=(1, 1), slots=(1, NO_REGIME))
    assert Sequences(lengths=(4, 2)).of_rows([1]).slots is None
