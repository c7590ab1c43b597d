"""Evaluation between training steps, without effect on training.

It and `decoding` are generators that yield after every forward pass, so that the loop can return to training when the
time budget is spent. A job that spans several training steps sees the weights of one step, or fails
(`pinned_weights`). Nothing here draws a random number or computes a gradient.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unicodedata import east_asian_width

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


_PUNCTUATION = ".,;:!?\"'()[]。，、；：！？「」（）"


def normalise(text: str) -> list[str]:
    """Split into lower-case words without surrounding punctuation; wide characters (Chinese, Japanese) are words.

    >>> normalise("The  Answer: 42.")
    ['the', 'answer', '42']
    """
    spaced = "".join(f" {letter} " if east_asian_width(letter) in "WF" else letter for letter in text.lower())
    stripped = (word.strip(_PUNCTUATION) for word in spaced.split())
    return [word for word in stripped if word]


def exact_match(output: str, reference: str) -> float:
    """Return 1.0 if both have the same words after `normalise`, else 0.0.

    >>> exact_match("Positive.", " positive")
    1.0
    """
    return float(normalise(output) == normalise(reference))


def rouge_l(output: str, reference: str) -> float:
    """Compute the F1 of the longest common subsequence of words, in [0, 1] (Lin 2004, eq. 2-4 with beta = 1).

    >>> round(rouge_l("the cat sat", "the cat lay down"), 3)
    0.571
    """
    found, expected = normalise(output), normalise(reference)
    if not found or not expected:
        return float(found == expected)
    common = _longest_common_subsequence(found, expected)
    return 2 * common / (len(found) + len(expected))


def _longest_common_subsequence(left: list[str], right: list[str]) -> int:
    lengths = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for column, other in enumerate(right, start=1):
            above = lengths[column]
            lengths[column] = diagonal + 1 if word == other else max(above, lengths[column - 1])
            diagonal = above
    return lengths[-1]
