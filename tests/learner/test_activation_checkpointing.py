"""Checkpointed layers: what a step computes is the same, and less is kept for it."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from streamlearn.adapters.context import RoutingContext, routing_context
from streamlearn.adapters.presets import PRESETS
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import pack, packed_loss
from tests.doubles import random_examples
from tests.learners import MakeLearner, same, snapshot

EXAMPLES = random_examples([9, 7, 8, 12], prompt_length=4)
STEPS = 3


def loads(learner: Learner) -> list[Tensor]:
    return [bank.load_HK.clone() for bank in learner.banks if bank.load_HK is not None]


def steps(learner: Learner, slots: list[int] | None) -> list[Step]:
    torch.manual_seed(0)  # the noise of sequence routing
    return [learner.step(EXAMPLES, slots) for _ in range(STEPS)]


def slots_of(learner: Learner) -> list[int] | None:
    return [0, 1, 0, 2] if learner.routes_by_regime else None


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_are_bit_equal(make_learner: MakeLearner, preset: str) -> None:
    """Losses, gradient norms, weights, moments and loads after several steps, for every preset."""
    kept, again = make_learner(preset=preset), make_learner(preset=preset, activation_checkpointing=True)
    assert steps(kept, slots_of(kept)) == steps(again, slots_of(again))
    assert same(snapshot(kept), snapshot(again))
    assert all(map(torch.equal, loads(kept), loads(again)))


@pytest.mark.parametrize("preset", ["mh-moe", "mot"])
def test_hooks_are_called_once(make_learner: MakeLearner, preset: str) -> None:
    """A backward pass that computes layers again shows their routing to nobody."""
    learner = make_learner(preset=preset, activation_checkpointing=True)
    seen: list[str] = []
    context = RoutingContext(hooks=(lambda layer, _: seen.append(layer.name),))
    packed = pack(EXAMPLES, learner.device)
    with routing_context(learner.model, context):
        loss = packed_loss(learner.forward, packed).mean
    after_forward = list(seen)
    torch.autograd.backward(loss)
    assert seen == after_forward
    assert len(seen) == len(set(seen)) > 0


def test_a_layer_is_computed_again_under_its_own_context_in_any_thread(make_learner: MakeLearner) -> None:
    """Autograd's threads for a GPU know no routing context, and another pass may have begun in between."""
    gradients = []
    for elsewhere in (False, True):
        learner = make_learner(preset="streamlearn", activation_checkpointing=True)
        packed = pack(EXAMPLES, learner.device, [1, 1, 2, 2])
        with routing_context(learner.model, packed.context()):
            loss = packed_loss(learner.forward, packed).mean
        with routing_context(learner.model, pack(EXAMPLES, learner.device, [0, 0, 0, 0]).context()):
            if elsewhere:
                thread = threading.Thread(target=torch.autograd.backward, args=(loss,))
                thread.start()
                thread.join()
            else:
                torch.autograd.backward(loss)
        gradients.append([bank.B.grad for bank in learner.banks])
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("preset", ["streamlearn", "mh-moe", "mot"])
def test_less_is_kept_for_the_backward_pass(make_learner: MakeLearner, preset: str) -> None:
    """The tensors that the graph holds after the forward pass, in bytes."""

    def kept(**settings: Any) -> int:
        learner = make_learner(preset=preset, **settings)
        packed = pack(EXAMPLES, learner.device, slots_of(learner))
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
            routing_context(learner.model, packed.context()),
        ):
            packed_loss(learner.forward, packed)
        return sum(saved.values())

    assert kept(activation_checkpointing=True) < kept() / 2


def test_dropout_stays_off(make_learner: MakeLearner) -> None:
    """No layer is put into training mode."""
    learner = make_learner(activation_checkpointing=True)
    learner.step(EXAMPLES)
    assert not any(layer.training for layer in learner.forward.get_decoder().layers)
