"""What presets add to the task loss, on a model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from streamlearn.adapters.routing_context import AdaptedLayer, RoutingContext, RoutingDecision, routing_context
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.packing import pack
from streamlearn.stream.decode import Example
from tests.doubles import random_examples
from tests.learners import MakeLearner, snapshot

EXAMPLES = random_examples([9, 7, 8], prompt_length=4)


class Notes:
    """Keeps what every layer decided."""

    def __init__(self) -> None:
        self.routed: list[RoutingDecision] = []

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        self.routed.append(decision)


def routing(
    learner: Learner, examples: Sequence[Example], slots: Sequence[int] | None, *, explore: bool = False
) -> list[RoutingDecision]:
    notes = Notes()
    packed = pack(examples, learner.device, slots)
    with torch.no_grad(), routing_context(learner.model, packed.context(explore=explore, hooks=(notes,))):
        packed_loss(learner.forward, packed)
    return notes.routed


def favour(learner: Learner, slot: int, expert: int, strength: float = 50.0) -> None:
    for bank in learner.banks:
        assert bank.bias_HKN is not None
        bank.bias_HKN[:, expert, slot] = strength


@pytest.mark.parametrize("preset", ["streamlearn", "cp-moe"])
def test_each_record_is_routed_with_its_own_regimes_bias(make_learner: MakeLearner, preset: str) -> None:
    """Two regimes in one row: each record's tokens go where its own bias sends them."""
    learner = make_learner(preset=preset)
    favour(learner, 1, 2)
    favour(learner, 3, 0)
    first = routing(learner, EXAMPLES, [1, 3, 0])[0]
    assert first.selected_HKT[:, 2, :9].all()
    assert first.selected_HKT[:, 0, 9:16].all()
    plain = routing(learner, EXAMPLES, [0, 0, 0])[0]
    assert torch.equal(first.selected_HKT[:, :, 16:], plain.selected_HKT[:, :, 16:])


def test_the_bias_leaves_native_logits_alone(make_learner: MakeLearner) -> None:
    """In the first layer, whose input no adapter has touched yet, the logits are the very same bits (CP-MoE eq. 12)."""
    learner = make_learner(preset="cp-moe")
    plain = routing(learner, EXAMPLES, [1, 1, 1])[0].native_HKT
    favour(learner, 1, 2)
    biased = routing(learner, EXAMPLES, [1, 1, 1])[0]
    assert torch.equal(biased.native_HKT, plain)
    assert biased.selected_HKT[:, 2].all()


def test_the_bias_of_a_passage_does_not_outlive_it(make_learner: MakeLearner) -> None:
    """After a biased pass an unbiased one routes as if there had been none."""
    learner = make_learner(preset="streamlearn")
    before = routing(learner, EXAMPLES, None)[0].selected_HKT
    favour(learner, 1, 2)
    routing(learner, EXAMPLES, [1, 1, 1])
    assert torch.equal(routing(learner, EXAMPLES, None)[0].selected_HKT, before)


def gradients(learner: Learner) -> dict[str, Tensor]:
    """Of the routers after one step's backward pass, before any clipping."""
    found: dict[str, Tensor] = {}
    apply = learner.optimizer.step

    def keep(lr: float) -> None:
        found.update({b.name: b.router.grad.clone() for b in learner.banks if b.router is not None})  # type: ignore[union-attr]
        apply(lr)

    learner.optimizer.step = keep  # type: ignore[method-assign]
    learner.step(EXAMPLES, [0] * len(EXAMPLES))
    return found


def test_balance_is_added_to_the_task_loss_and_not_to_the_report(make_learner: MakeLearner) -> None:
    """Gamma L_aux moves the routers; the reported loss is the task's."""
    with_aux = make_learner(preset="cp-moe", changes={"balance_strength": 5.0}, max_grad_norm=1e9)
    without = make_learner(preset="cp-moe", changes={"balance_strength": 0.0}, max_grad_norm=1e9)
    ones, others = gradients(with_aux), gradients(without)
    assert any(not torch.equal(ones[name], others[name]) for name in ones)
    losses = [
        make_learner(preset="cp-moe", changes={"balance_strength": gamma}).step(EXAMPLES, [0, 0, 0]).loss
        for gamma in (0.0, 5.0)
    ]
    assert losses[0] == losses[1]


def test_localized_balance_needs_a_sample_type(make_learner: MakeLearner) -> None:
    """Typed samples change the update of `loramoe`; without types it is the update without the constraint."""
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


def test_a_frozen_router_stays_and_a_slow_one_moves_less(make_learner: MakeLearner) -> None:
    """`router_lr` scales the routers' learning rate alone."""
    distances = []
    for part in (0.0, 0.1, 1.0):
        learner = make_learner(preset="mh-moe", changes={"router_lr": part}, weight_decay=0.0)
        before = [b.router.detach().clone() for b in learner.banks if b.router is not None]
        learner.step(EXAMPLES)
        after = [b.router.detach() for b in learner.banks if b.router is not None]
        distances.append(sum(float((a - b).norm()) for a, b in zip(after, before, strict=True)))
    assert distances[0] == 0.0
    assert distances[1] == pytest.approx(distances[2] / 10, rel=1e-4)


def test_sequences_are_routed_whole_and_by_their_prompt_alone(make_learner: MakeLearner) -> None:
    """`mot`: all tokens of a record and all linears of a block share one choice, and answers do not decide it."""
    learner = make_learner(preset="mot")
    routed = routing(learner, EXAMPLES, None)
    assert len(routed) == 2  # one gate a block
    assert all(each.selected_HKT.shape == (1, 8, 3) for each in routed)
    changed = [
        replace(example, input_ids=example.input_ids.copy(), labels=example.labels.copy()) for example in EXAMPLES
    ]
    for example in changed:
        example.input_ids[4:] = 20
        example.labels[4:] = 20
    torch.testing.assert_close(routing(learner, changed, None)[0].native_HKT, routed[0].native_HKT)


def test_exploration_noise_is_for_training(make_learner: MakeLearner) -> None:
    """MoT eq. 1: with noise choices differ between passes, without they do not."""
    learner = make_learner(preset="mot")
    for bank in learner.banks:
        bank.layer.head_lora_config["default"].noise = 100.0
    torch.manual_seed(0)
    draws = {tuple(routing(learner, EXAMPLES, None, explore=True)[0].selected_HKT.flatten().tolist()) for _ in range(8)}
    calm = {tuple(routing(learner, EXAMPLES, None)[0].selected_HKT.flatten().tolist()) for _ in range(8)}
    assert len(draws) > 1
    assert len(calm) == 1


def test_a_sequence_keeps_its_experts_while_it_is_decoded(make_learner: MakeLearner) -> None:
    """The prompt's pass decides; later tokens follow it."""
    learner = make_learner(preset="mot")
    notes = Notes()
    context = RoutingContext(decoding=True, hooks=(notes,))
    ids = torch.from_numpy(np.stack([EXAMPLES[0].input_ids, EXAMPLES[0].input_ids[::-1]])).long()
    with torch.no_grad(), routing_context(learner.model, context):
        learner.forward(input_ids=ids, use_cache=False)
        chosen = {block: routed.selected_HKT.clone() for block, routed in context.block_decisions.items()}
        learner.forward(input_ids=ids[:, :1], use_cache=False)
    assert len(notes.routed) == 2
    assert all(torch.equal(context.block_decisions[block].selected_HKT, chosen[block]) for block in chosen)


@pytest.mark.parametrize("preset", ["streamlearn", "cp-moe", "mot", "loramoe"])
def test_goes_on_from_a_saved_state_bit_for_bit(make_learner: MakeLearner, preset: str) -> None:
    """Biases, path integrals, stages: all that a step depends on is in `state`."""
    straight, resumed = make_learner(preset=preset), make_learner(preset=preset)
    torch.manual_seed(1)
    for seed in range(3):
        straight.step(random_examples([8, 5], prompt_length=3, seed=seed), [0, 1])
    saved, rng = snapshot(straight), torch.get_rng_state()
    with torch.no_grad():
        for i, parameter in enumerate(resumed.optimizer.parameters()):
            parameter.copy_(saved[f"weight.{i}"])
    resumed.load_state({name: tensor for name, tensor in saved.items() if not name.startswith("weight.")})
    ends = []
    for learner in (straight, resumed):
        torch.set_rng_state(rng)
        learner.step(random_examples([8, 5], prompt_length=3, seed=9), [1, 0])
        ends.append(snapshot(learner))
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
