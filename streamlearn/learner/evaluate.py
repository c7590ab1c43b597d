"""Evaluation between training steps, without effect on training.

Like `generate`, it yields after every forward pass, so that the loop can return to training when the time budget is
spent. A job that spans several training steps sees the weights of one step, or fails (`cache`). Nothing
here draws a random number or computes a gradient.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from streamlearn.adapters.context import ParallelAdapter, RoutingHook, Slot, routing_context
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.stream.record import IGNORED, Example, Prompt

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
        examples: The examples.
        device: Where the model is.
        pack_tokens: Maximum tokens per forward pass; a longer example gets a pass of its own.
        slots: Adapter of each example; None without regimes.
        hooks: Routing hooks of every pass.
        parallel_adapter: A second adapter in addition to `slots`.

    Returns:
        The scores, in the order of `examples`.
    """
    scores: list[ExampleScore] = []
    for indices in _groups(examples, pack_tokens):
        group = [examples[i] for i in indices]
        packed = pack(group, device, None if slots is None else [slots[i] for i in indices])
        context = packed.context(hooks=hooks)
        context.parallel_adapter = parallel_adapter
        with torch.no_grad(), routing_context(model, context):
            sums, correct = torch.stack(packed_loss(model.get_base_model(), packed).per_record(packed)).tolist()
        scores.extend(
            ExampleScore(total, int(right), example.num_learned)
            for total, right, example in zip(sums, correct, group, strict=True)
        )
        yield
    return scores


def _groups(examples: Sequence[Example], pack_tokens: int) -> Iterator[list[int]]:
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


def first_tokens(examples: Sequence[Example], tokens: int) -> list[Example]:
    """Return the first examples, at least one, up to at least `tokens` tokens in total."""
    return next(token_groups(examples, tokens))


def token_groups(examples: Sequence[Example], tokens: int) -> Iterator[list[Example]]:
    """Yield consecutive examples of at least `tokens` tokens in total; the last group has the rest."""
    group: list[Example] = []
    for example in examples:
        group.append(example)
        if sum(map(len, group)) >= tokens:
            yield group
            group = []
    if group:
        yield group


def prompt_of(example: Example) -> Prompt:
    """Return the part of an example before its first learned token."""
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
