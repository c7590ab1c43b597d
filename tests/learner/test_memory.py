"""Retries in smaller parts when memory runs out, activation checkpointing, and the random state."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

import streamlearn.learner.learner as learner_module
from streamlearn.adapters.context import RoutingContext, routing_context
from streamlearn.adapters.presets import PRESETS
from streamlearn.events import Event
from streamlearn.learner.learner import Learner, Rehearsal, Step
from streamlearn.learner.loss import PackedBatch, PackedLoss, pack, packed_loss
from streamlearn.learner.memory import (
    MAX_RETRIES,
    is_out_of_memory,
    random_state,
    restore_random_state,
    with_oom_retry,
)
from tests.doubles import random_examples
from tests.learners import MakeLearner, same, snapshot

EXAMPLES = random_examples([9, 4, 6, 12, 5], prompt_length=2)

Loss = Callable[[Any, PackedBatch], PackedLoss]


def limited_to(max_tokens: int) -> Loss:
    """A forward pass that runs out of memory with more tokens than that."""

    def limited(model: Any, packed: PackedBatch) -> PackedLoss:
        if packed.input_ids.shape[1] > max_tokens:
            torch.empty(1 << 60, dtype=torch.uint8)  # more than any machine has
        return packed_loss(model, packed)

    return limited


@pytest.mark.parametrize(("preset", "parts"), [("streamlearn", 3), ("mh-moe", 5)])
def test_parts_add_up_to_the_whole(make_learner: MakeLearner, preset: str, parts: int) -> None:
    """Loss, gradient norm, figures of each record and updated weights are those of one pass."""
    whole, split = make_learner(preset=preset), make_learner(preset=preset)
    for _ in range(3):
        expected, result = whole.step(EXAMPLES), split.step(EXAMPLES, parts=parts)
    assert result.record_losses == pytest.approx(expected.record_losses, rel=1e-4)
    assert (result.loss, result.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-4)
    for each in ("number", "tokens", "learned_tokens", "record_correct", "refusal"):
        assert getattr(result, each) == getattr(expected, each)
    for mine, other in zip(split.optimizer.parameters(), whole.optimizer.parameters(), strict=True):
        # Adam divides by the gradient's size: the rounding of a tiny one moves a weight by up to a hundredth of lr.
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_out_of_memory_makes_smaller_parts(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is retried in more parts, equals a step made in that many parts, and each retry is logged."""
    expected, learner = make_learner(), make_learner()
    expected.step(EXAMPLES, parts=4)
    monkeypatch.setattr(learner_module, "packed_loss", limited_to(18))
    with capture_logs() as logs:
        step = learner.step(EXAMPLES)
    assert step.refusal is None
    assert [log["parts"] for log in logs if log["event"] == Event.OUT_OF_MEMORY_RETRIED] == [2, 4]
    assert same(snapshot(learner), snapshot(expected))


def test_every_update_of_a_batch_is_retried_in_smaller_parts(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rehearsed records too: the bits of a step made in that many parts."""
    rehearsed = [Rehearsal(random_examples([6, 8], seed=seed), []) for seed in (1, 2)]
    expected, learner = (make_learner(updates_per_batch=2) for _ in range(2))
    announced: list[int] = []
    expected.step(EXAMPLES, parts=4, rehearsed=rehearsed)
    monkeypatch.setattr(learner_module, "packed_loss", limited_to(18))
    step = learner.step(EXAMPLES, rehearsed=rehearsed, on_record=announced.append)
    assert (step.refusal, step.ended, len(step.record_losses)) == (None, None, len(EXAMPLES))
    assert announced == 2 * [0, 0, 0, 1, 3, 5]
    assert same(snapshot(learner), snapshot(expected))


def test_out_of_memory_in_the_smallest_parts_changes_nothing(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised after the last retry; weights and optimizer have not changed."""
    learner = make_learner()
    learner.step(EXAMPLES)
    before = _without_counts(learner)
    monkeypatch.setattr(learner_module, "packed_loss", limited_to(11))
    with capture_logs() as logs, pytest.raises(RuntimeError) as raised:
        learner.step(EXAMPLES)
    assert is_out_of_memory(raised.value)
    assert [log["parts"] for log in logs if log["event"] == Event.OUT_OF_MEMORY_RETRIED] == [2, 4, 5][:MAX_RETRIES]
    after = _without_counts(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in learner.optimizer.parameters())


def test_every_try_starts_from_the_same_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the GPU's generator too, where the model is on one: routing noise is drawn there."""
    on_gpu = torch.tensor([7], dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: on_gpu.clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _: on_gpu.copy_(state))
    seen: list[tuple[float, int]] = []

    def work(parts: int) -> int:
        seen.append((float(torch.rand(())), int(on_gpu)))
        on_gpu.add_(1)
        if parts < 4:
            raise torch.OutOfMemoryError
        return parts

    assert with_oom_retry(work, 1, 8, lambda: None, torch.device("cuda")) == 4
    assert len(seen) == 3
    assert len(set(seen)) == 1


def _without_counts(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in snapshot(learner).items() if "counts" not in name}


RECORDS = random_examples([9, 7, 8, 12], prompt_length=4)

STEPS = 3


def loads(learner: Learner) -> list[Tensor]:
    return [bank.load_HK.clone() for bank in learner.banks if bank.load_HK is not None]


def steps(learner: Learner, slots: list[int] | None) -> list[Step]:
    torch.manual_seed(0)  # the noise of sequence routing
    return [learner.step(RECORDS, slots) for _ in range(STEPS)]


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
    packed = pack(RECORDS, learner.device)
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
        packed = pack(RECORDS, learner.device, [1, 1, 2, 2])
        with routing_context(learner.model, packed.context()):
            loss = packed_loss(learner.forward, packed).mean
        with routing_context(learner.model, pack(RECORDS, learner.device, [0, 0, 0, 0]).context()):
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


def test_less_is_kept_for_the_backward_pass(make_learner: MakeLearner) -> None:
    """The tensors that the graph holds after the forward pass, in bytes."""

    def kept(**settings: Any) -> int:
        learner = make_learner(preset="streamlearn", **settings)
        packed = pack(RECORDS, learner.device, slots_of(learner))
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


ON_CPU, ON_GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_the_next_draw_is_repeated() -> None:
    """And the state is taken out of the tensors, whose other names are the learner's."""
    tensors = {**random_state(ON_CPU), "A": torch.zeros(1)}
    drawn = torch.rand(4)
    restore_random_state(tensors, ON_CPU)
    assert torch.equal(torch.rand(4), drawn)
    assert [*tensors] == ["A"]
