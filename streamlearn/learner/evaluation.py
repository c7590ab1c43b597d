"""Evaluate and generate between training steps, without touching them.

Both are generators that yield after every piece of work, so that the loop can go back to training when a time budget is
spent. A job that spans several training steps still sees the weights of one: `PinnedWeights` holds a copy and swaps it
in for each piece. Nothing here draws a random number or needs a gradient.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from streamlearn.adapters.routing_context import RoutingContext, RoutingHook, routing_context
from streamlearn.learner.loss import arguments, packed_loss
from streamlearn.learner.packing import joined_features, pack, vision_units
from streamlearn.stream.decode import Example, Prompt
from streamlearn.stream.encode import IGNORED

_R = TypeVar("_R")
DECODE_ROWS = 16  # prompts decoded side by side


@dataclass(frozen=True)
class ExampleScore:
    """Teacher-forced figures of one example."""

    loss_sum: float
    """Nats, summed over the learned tokens."""
    correct: int
    """Learned tokens that were the most probable ones."""
    tokens: int
    """Learned tokens."""


class PinnedWeights:
    """A copy of weights as they are now, to be swapped in for a while."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._copies = [parameter.detach().clone() for parameter in parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model computes with the copy; afterwards the very tensors of before are back."""
        live = [parameter.data for parameter in self._parameters]
        try:
            self._point_at(self._copies)
            yield
        finally:
            self._point_at(live)

    def _point_at(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor


def score(
    model: Any,
    examples: Sequence[Example],
    device: torch.device,
    *,
    pack_tokens: int,
    slots: Sequence[int] | None = None,
    hooks: tuple[RoutingHook, ...] = (),
) -> Generator[None, None, list[ExampleScore]]:
    """Loss and accuracy per example, in order; examples are packed into rows of at most `pack_tokens`.

    `model` is the PEFT model; `slots` are the examples' regimes.
    """
    scores: list[ExampleScore] = []
    for chosen in _rows(examples, pack_tokens):
        group = [examples[i] for i in chosen]
        packed = pack(group, device, None if slots is None else [slots[i] for i in chosen])
        with torch.no_grad(), routing_context(model, packed.context(hooks=hooks)):
            loss = packed_loss(model.get_base_model(), packed)
            sums, counts = loss.per_record(packed)
            correct = torch.bincount(packed.segment_ids_L[loss.correct_L], minlength=len(group))
        scores.extend(
            ExampleScore(*figures) for figures in zip(sums.tolist(), correct.tolist(), counts.tolist(), strict=True)
        )
        yield
    return scores


def _rows(examples: Sequence[Example], pack_tokens: int) -> Iterator[list[int]]:
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
    """What stands before the first learned token."""
    end = example.prompt_length
    images = tuple(image for image, start in zip(example.images, example.image_starts, strict=True) if start < end)
    positions = None if example.positions is None else example.positions[:, :end]
    return Prompt(example.input_ids[:end].tolist(), images, positions)


def reference_of(example: Example) -> list[int]:
    """The learned ids."""
    ids: list[int] = example.labels[example.labels != IGNORED].tolist()
    return ids


def decode_greedily(
    model: Any,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    stop: frozenset[int],
    device: torch.device,
    slots: Sequence[int] | None = None,
) -> Generator[None, None, list[list[int]]]:
    """Continue each prompt by at most `limits[i]` most probable tokens, until a token of `stop`, which is left out.

    `model` is the PEFT model; `slots` are the prompts' regimes. Prompts of similar length are decoded side by side,
    padded on the left, with a key-value cache; yields per token.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    for start in range(0, len(order), DECODE_ROWS):
        chosen = order[start : start + DECODE_ROWS]
        rows = None if slots is None else torch.tensor([slots[i] for i in chosen], device=device)
        finished = yield from _decode_rows(
            model, [prompts[i] for i in chosen], [limits[i] for i in chosen], stop, device, rows
        )
        for i, output in zip(chosen, finished, strict=True):
            outputs[i] = output
    return outputs


def _decode_rows(
    model: Any,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    stop: frozenset[int],
    device: torch.device,
    slots_B: Tensor | None,
) -> Generator[None, None, list[list[int]]]:
    longest = max(len(p.ids) for p in prompts)
    filler = next(iter(stop), 0)
    ids = torch.tensor([[filler] * (longest - len(p.ids)) + p.ids for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p.ids)) + [1] * len(p.ids) for p in prompts], device=device)
    positions = _padded_positions(prompts, longest).to(device)
    features = joined_features([image for p in prompts for image in p.images], device)
    forward = model.get_base_model()
    cache = DynamicCache(config=forward.config)
    vision_units_B = vision_units([prompt.images for prompt in prompts], device)
    context = RoutingContext(
        slots_B=slots_B, prompt_T=mask.flatten().bool(), vision_units_B=vision_units_B, decoding=True
    )
    outputs: list[list[int]] = [[] for _ in prompts]
    alive = [limit > 0 for limit in limits]
    while any(alive):
        with torch.no_grad(), routing_context(model, context):
            logits = forward(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **arguments(forward, features),
            ).logits[:, -1]
            best = logits.argmax(dim=-1)
        for i, token in enumerate(best.tolist()):
            alive[i] = alive[i] and token not in stop
            if alive[i]:
                outputs[i].append(token)
                alive[i] = len(outputs[i]) < limits[i]
        # Behind an image the last token has not the largest position.
        ids, positions, features = best[:, None], positions.amax((0, -1) if positions.ndim > 2 else -1)[:, None] + 1, {}
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        yield
    return outputs


def _padded_positions(prompts: Sequence[Prompt], longest: int) -> Tensor:
    """(B, T) positions of prompts padded on the left; (P, B, T) where one of them has P coordinates a token."""
    own = [np.arange(len(p.ids))[None] if p.positions is None else p.positions for p in prompts]
    most = max(map(len, own))
    padded = np.zeros((most, len(prompts), longest), dtype=np.int64)
    for number, each in enumerate(own):
        padded[:, number, longest - each.shape[1] :] = each
    return torch.from_numpy(padded if most > 1 else padded[0])


def run_to_end(work: Generator[None, None, _R]) -> _R:
    """Run a piecewise job to its end: what the command line does with a snapshot."""
    while True:
        try:
            next(work)
        except StopIteration as finished:
            result: _R = finished.value
            return result
