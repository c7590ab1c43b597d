"""Evaluation between training steps, without effect on training.

It and `decoding` are generators that yield after every forward pass, so that the loop can return to training when the
time budget is spent. A job that spans several training steps sees the weights of one step, or fails
(`pinned_weights`). Nothing here draws a random number or computes a gradient.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from streamlearn.adapters.routing_context import ParallelAdapter, RoutingHook, routing_context
from streamlearn.adapters.sequences import Slot
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.packing import pack
from streamlearn.stream.decode import Example, Prompt
from streamlearn.stream.encode import IGNORED

_R = TypeVar("_R")


@dataclass(frozen=True)
class ExampleScore:
    """Teacher-forced loss and accuracy of one example."""

    loss_sum: float
    """Nats, summed over the learned tokens."""
    correct: int
    """Learned tokens that were the most probable token."""
    tokens: int
    """Learned tokens."""


def score(
    model: Any,
    examples: Sequence[Example],
    device: torch.device,
    *,
    pack_tokens: int,
    slots: Sequence[Slot] | None = None,
    hooks: tuple[RoutingHook, ...] = (),
    parallel_adapter: ParallelAdapter | None = None,
) -> Generator[None, None, list[ExampleScore]]:
    """Compute loss and accuracy of each example; yields after every forward pass.

    Args:
        model: The PEFT model.
        examples: What to score.
        device: Where the model is.
        pack_tokens: Maximum tokens per forward pass; a longer example gets a pass of its own.
        slots: What adapts each example; None without regimes.
        hooks: Routing hooks of every pass.
        parallel_adapter: A second adapter beside what the slots say.

    Returns:
        The scores, in the order of `examples`.
    """
    scores: list[ExampleScore] = []
    for indices in groups(examples, pack_tokens):
        group = [examples[i] for i in indices]
        packed = pack(group, device, None if slots is None else [slots[i] for i in indices])
        context = packed.context(hooks=hooks)
        context.parallel_adapter = parallel_adapter
        with torch.no_grad(), routing_context(model, context):
            sums, correct = torch.stack(packed_loss(model.get_base_model(), packed).per_record(packed)).tolist()
        scores.extend(
            ExampleScore(total, int(right), each.num_learned)
            for total, right, each in zip(sums, correct, group, strict=True)
        )
        yield
    return scores


def groups(examples: Sequence[Example], pack_tokens: int) -> Iterator[list[int]]:
    """Indices of consecutive examples to pack together."""
    group: list[int] = []
    tokens = 0
    for index, example in enumerate(examples):
        if group and tokens + len(example) > pack_tokens:
            yield group
            group, tokens = [], 0
        group.append(index)
        tokens += len(example)
    if group:
        yield group


def prompt_of(example: Example) -> Prompt:
    """Return what precedes the first learned token of an example."""
    end = example.prompt_length
    images = tuple(image for image, start in zip(example.images, example.image_starts, strict=True) if start < end)
    positions = None if example.positions is None else example.positions[:, :end]
    return Prompt(example.input_ids[:end].tolist(), images, positions)


def reference_of(example: Example) -> list[int]:
    """Return the ids of the learned tokens."""
    ids: list[int] = example.labels[example.labels != IGNORED].tolist()
    return ids


def run_to_end(work: Generator[None, None, _R]) -> _R:
    """Run a job without a break and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as finished:
            result: _R = finished.value
            return result
