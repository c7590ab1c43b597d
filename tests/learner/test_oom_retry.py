"""A step in parts is the same step; memory that does not suffice makes it one in parts."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

import streamlearn.learner.learner as learner_module
from streamlearn.events import Event
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import PackedLoss, packed_loss
from streamlearn.learner.oom_retry import MAX_RETRIES, is_out_of_memory, slices
from streamlearn.learner.packing import PackedBatch
from tests.doubles import random_examples
from tests.learners import MakeLearner, same, snapshot

EXAMPLES = random_examples([9, 4, 6, 12, 5], prompt_length=2)
Loss = Callable[[Any, PackedBatch], PackedLoss]


def needing(most_tokens: int) -> Loss:
    """A forward pass for which more tokens are too many."""

    def limited(model: Any, row: PackedBatch) -> PackedLoss:
        if row.input_ids.shape[1] > most_tokens:
            torch.empty(1 << 60, dtype=torch.uint8)  # more than any machine has
        return packed_loss(model, row)

    return limited


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("preset", ["streamlearn", "mh-moe", "lora"])
def test_parts_add_up_to_the_whole(make_learner: MakeLearner, preset: str, parts: int) -> None:
    """Loss, gradient norm, each record's figures and the weights after the update are those of one pass."""
    whole, parted = make_learner(preset=preset), make_learner(preset=preset)
    for _ in range(3):
        wanted, found = whole.step(EXAMPLES), parted.step(EXAMPLES, parts=parts)
    assert found.record_losses == pytest.approx(wanted.record_losses, rel=1e-4)
    assert (found.loss, found.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-4)
    for each in ("number", "tokens", "learned_tokens", "record_correct", "refusal"):
        assert getattr(found, each) == getattr(wanted, each)
    for mine, other in zip(parted.optimizer.parameters(), whole.optimizer.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def test_records_are_announced(make_learner: MakeLearner) -> None:
    """Each part's first record is named before the part is passed through."""
    heard: list[int] = []
    make_learner().step(EXAMPLES, parts=5, on_record=heard.append)
    assert heard == [0, 1, 2, 3, 4]


def test_too_little_memory_makes_smaller_parts(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is made in as many parts as fit, equal to one that was asked for so; a line in the log says it."""
    wanted, learner = make_learner(), make_learner()
    wanted.step(EXAMPLES, parts=4)
    monkeypatch.setattr(learner_module, "packed_loss", needing(18))
    with capture_logs() as logs:
        step = learner.step(EXAMPLES)
    assert step.refusal is None
    assert [log["parts"] for log in logs if log["event"] == Event.OUT_OF_MEMORY_RETRIED] == [2, 4]
    assert same(snapshot(learner), snapshot(wanted))


@pytest.mark.parametrize("most_tokens", [0, 11])
def test_too_little_for_anything_changes_nothing(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, most_tokens: int
) -> None:
    """The error comes out after so many tries; weights and optimizer are as they were."""
    learner = make_learner()
    learner.step(EXAMPLES)
    before = _without_counts(learner)
    monkeypatch.setattr(learner_module, "packed_loss", needing(most_tokens))
    with capture_logs() as logs, pytest.raises(RuntimeError) as raised:
        learner.step(EXAMPLES)
    assert is_out_of_memory(raised.value)
    assert [log["parts"] for log in logs if log["event"] == Event.OUT_OF_MEMORY_RETRIED] == [2, 4, 5][:MAX_RETRIES]
    after = _without_counts(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in learner.optimizer.parameters())


def test_other_errors_are_not_tried_again(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that has nothing to do with memory comes out at once."""
    calls = []

    def broken(model: Any, row: PackedBatch) -> PackedLoss:
        calls.append(row)
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(learner_module, "packed_loss", broken)
    with pytest.raises(RuntimeError, match="size mismatch"):
        make_learner().step(EXAMPLES)
    assert len(calls) == 1


def test_shares_cover_everything_once() -> None:
    """Neighbours, in order, none empty."""
    for number in range(1, 20):
        for parts in range(1, number + 1):
            taken = [list(range(number))[part] for part in slices(number, parts)]
            assert list(chain.from_iterable(taken)) == list(range(number))
            assert len(taken) == parts
            assert all(taken)


def _without_counts(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in snapshot(learner).items() if "counts" not in name}
