"""Evaluation and generation between training steps, without effect on training.

Both are generators that yield after every forward pass, so that the loop can return to training when the time budget is
spent. A job that spans several training steps sees the weights of one step: `PinnedWeights` keeps a copy and swaps it
in for each pass. Nothing here draws a random number or computes a gradient.
"""
# Shape suffixes: B prompts decoded together, T tokens.

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from streamlearn.adapters.routing_context import RoutingContext, RoutingDecision, RoutingHook, routing_context
from streamlearn.learner.loss import arguments, packed_loss
from streamlearn.learner.packing import joined_features, pack, vision_units
from streamlearn.stream.decode import Example, Prompt
from streamlearn.stream.encode import IGNORED

_R = TypeVar("_R")
DECODE_BATCH = 16
"""Maximum number of prompts decoded together, unless the caller sets another."""
TOKENS_PER_CHECK: Mapping[str, int] = {"cuda": 8}
"""Tokens after which texts are checked for their end, by type of device; else 1. A check makes a GPU wait."""


@dataclass(frozen=True)
class ExampleScore:
    """Teacher-forced loss and accuracy of one example."""

    loss_sum: float
    """Nats, summed over the learned tokens."""
    correct: int
    """Learned tokens that were the most probable token."""
    tokens: int
    """Learned tokens."""


class PinnedWeights:
    """A copy of the current weights, to be swapped in temporarily."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._copies = [parameter.detach().clone() for parameter in parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the copy inside the block; after it, or after an error, parameters point to their own memory again."""
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
    """Compute loss and accuracy of each example; yields after every forward pass.

    Args:
        model: The PEFT model.
        examples: What to score.
        device: Where the model is.
        pack_tokens: Maximum tokens per forward pass; a longer example gets a pass of its own.
        slots: Regime slot of each example; None without regimes.
        hooks: Routing hooks of every pass.

    Returns:
        The scores, in the order of `examples`.
    """
    scores: list[ExampleScore] = []
    for indices in _groups(examples, pack_tokens):
        group = [examples[i] for i in indices]
        packed = pack(group, device, None if slots is None else [slots[i] for i in indices])
        with torch.no_grad(), routing_context(model, packed.context(hooks=hooks)):
            loss = packed_loss(model.get_base_model(), packed)
            sums, counts = loss.per_record(packed)
            correct = torch.bincount(packed.segment_ids_L[loss.correct_L], minlength=len(group))
        scores.extend(
            ExampleScore(*figures) for figures in zip(sums.tolist(), correct.tolist(), counts.tolist(), strict=True)
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


def decode_greedily(
    model: Any,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    stop: frozenset[int],
    device: torch.device,
    slots: Sequence[int] | None = None,
    *,
    max_prompts: int = DECODE_BATCH,
    max_tokens: int | None = None,
) -> Generator[None, None, list[list[int]]]:
    """Continue each prompt greedily; yields after every token.

    Prompts of similar length are decoded together, padded on the left, with a key-value cache. Finished texts leave
    the batch.

    Args:
        model: The PEFT model.
        prompts: What to continue.
        limits: Maximum new tokens of each prompt.
        stop: Tokens that end a text; they are not part of it.
        device: Where the model is.
        slots: Regime slot of each prompt; None without regimes.
        max_prompts: Maximum number of prompts decoded together.
        max_tokens: Maximum tokens of prompts and texts decoded together, with padding; None: any number. A longer
            prompt is decoded separately.

    Returns:
        The new token ids of each prompt, in the order of `prompts`.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    order = sorted((i for i in range(len(prompts)) if limits[i] > 0), key=lambda i: len(prompts[i].ids))
    for indices in _batches(order, prompts, limits, max_prompts, max_tokens):
        slots_B = None if slots is None else torch.tensor([slots[i] for i in indices], device=device)
        finished = yield from _decode_batch(
            model, [prompts[i] for i in indices], [limits[i] for i in indices], stop, device, slots_B
        )
        for i, output in zip(indices, finished, strict=True):
            outputs[i] = output
    return outputs


def _batches(
    order: Sequence[int],
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    max_prompts: int,
    max_tokens: int | None,
) -> Iterator[list[int]]:
    """Indices of prompts to decode together, in the given order, which is by length."""
    batch: list[int] = []
    for i in order:
        width = len(prompts[i].ids) + max(limits[j] for j in [*batch, i])
        if batch and (len(batch) == max_prompts or (max_tokens is not None and width * (len(batch) + 1) > max_tokens)):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _decode_batch(
    model: Any,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    stop: frozenset[int],
    device: torch.device,
    slots_B: Tensor | None,
) -> Generator[None, None, list[list[int]]]:
    longest = max(len(p.ids) for p in prompts)
    padding = next(iter(stop), 0)
    ids = torch.tensor([[padding] * (longest - len(p.ids)) + p.ids for p in prompts], device=device)
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
    rows = list(range(len(prompts)))  # the prompt of each row that is still decoded
    unchecked: list[Tensor] = []
    while rows:
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
        # The maximum, not the last: after an image the last token may not have the largest position.
        ids, positions, features = best[:, None], positions.amax((0, -1) if positions.ndim > 2 else -1)[:, None] + 1, {}
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        unchecked.append(best)
        left = max(limits[i] - len(outputs[i]) for i in rows)
        if len(unchecked) == min(left, TOKENS_PER_CHECK.get(device.type, 1)):
            tokens_BT = torch.stack(unchecked, dim=1).tolist()
            kept = [row for row, i in enumerate(rows) if _extend(outputs[i], tokens_BT[row], limits[i], stop)]
            unchecked = []
            if 0 < len(kept) < len(rows):
                chosen = torch.tensor(kept, device=device)
                ids, positions, mask = ids[chosen], positions[chosen], mask[chosen]
                cache.batch_select_indices(chosen)
                context = _rows_of(context, chosen)
            rows = [rows[row] for row in kept]
        yield
    return outputs


def _extend(output: list[int], tokens: Sequence[int], limit: int, stop: frozenset[int]) -> bool:
    """Append tokens up to the text's end; return whether the text continues."""
    for token in tokens:
        if token in stop:
            return False
        output.append(token)
        if len(output) == limit:
            return False
    return True


def _rows_of(context: RoutingContext, rows_B: Tensor) -> RoutingContext:
    """The context of some rows of a batch whose prompts have been read."""
    decisions = {
        block: RoutingDecision(*(part[..., rows_B] for part in (each.native_HKT, each.selected_HKT, each.gate_HKT)))
        for block, each in context.block_decisions.items()
    }
    slots_B = None if context.slots_B is None else context.slots_B[rows_B]
    return replace(context, slots_B=slots_B, prompt_T=None, vision_units_B=None, block_decisions=decisions)


def _padded_positions(prompts: Sequence[Prompt], longest: int) -> Tensor:
    """Positions of prompts padded on the left: (B, T), or (P, B, T) if one of them has P coordinates per token."""
    own = [np.arange(len(p.ids))[None] if p.positions is None else p.positions for p in prompts]
    most = max(map(len, own))
    padded = np.zeros((most, len(prompts), longest), dtype=np.int64)
    for number, each in enumerate(own):
        padded[:, number, longest - each.shape[1] :] = each
    return torch.from_numpy(padded if most > 1 else padded[0])


def run_to_end(work: Generator[None, None, _R]) -> _R:
    """Run a job without a break and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as finished:
            result: _R = finished.value
            return result
