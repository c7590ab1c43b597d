"""Text generation between training steps, without effect on training.

The prompts of a batch are read in one packed pass, without padding. Their keys and values are then padded on the left,
so that every further pass adds one token to each text. Like `evaluate`, this is a generator that yields after every
pass.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from streamlearn.adapters.context import RoutingContext, RoutingDecision, Sequences, Slot, routing_context
from streamlearn.backbone.attention import Records
from streamlearn.learner.loss import arguments, joined_features, positions, vision_units
from streamlearn.stream.record import Prompt

# The choice of the next token from the logits: the most likely one, or a sample.
#
#     p = softmax(logits / temperature)                                          (1)
#     nucleus: the fewest tokens, most likely first, whose p sum to top_p        (2)
#
# Eq. (2) is nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).


# Shape suffixes: B texts decoded together, V tokens of the vocabulary.

TokenChoice = Callable[[Tensor], Tensor]
"""Maps logits (B, V) to the next token of each text (B,)."""


def most_likely(logits_BV: Tensor) -> Tensor:
    """Greedy decoding."""
    return logits_BV.argmax(-1)


class NucleusSampler:
    """Samples from the nucleus with its own generator: training's random state is neither read nor advanced.

    Texts that are decoded together draw in turn, so a text is repeatable if it is decoded separately.
    """

    def __init__(self, temperature: float, top_p: float, seed: int, device: torch.device) -> None:
        """Start the generator; `temperature` is above 0, `top_p` from 0 (most likely token) to 1 (every token)."""
        assert temperature > 0, "temperature 0 is greedy decoding"
        self._temperature = max(temperature, torch.finfo(torch.float32).tiny)  # a smaller one would divide by zero
        self._top_p = top_p
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Draw the next token of each text."""
        # The largest logit becomes 0, so that no temperature overflows.
        scaled_BV = (logits_BV.float() - logits_BV.float().amax(-1, keepdim=True)) / self._temperature
        if self._top_p >= 1:
            return self._draw(scaled_BV.softmax(-1))
        sorted_BV, tokens_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
        p_BV = sorted_BV.softmax(-1)  # (1)
        outside_BV = p_BV.cumsum(-1) - p_BV >= self._top_p  # (2)
        outside_BV[:, 0] = False
        ranks_B = self._draw(p_BV.masked_fill(outside_BV, 0.0))
        return tokens_BV.gather(-1, ranks_B[:, None])[:, 0]

    def _draw(self, weights_BV: Tensor) -> Tensor:
        return torch.multinomial(weights_BV, 1, generator=self._generator)[:, 0]


# Shape suffixes: T tokens of all prompts, L tokens of the longest, G key heads, E head size.

DECODE_BATCH = 16
"""Maximum number of prompts decoded together, unless the caller sets another."""
TOKENS_PER_CHECK: Mapping[str, int] = {"cuda": 8}
"""Tokens between checks whether texts have ended, by type of device; else 1. A check makes a GPU wait."""

OnToken = Callable[[int, int], bool]
"""Receives the index of a prompt and the next token of its text; returns whether the text continues."""


def decode(
    model: Any,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    stop: frozenset[int],
    device: torch.device,
    slots: Sequence[Slot] | None = None,
    *,
    choose: TokenChoice = most_likely,
    on_token: OnToken | None = None,
    max_prompts: int = DECODE_BATCH,
    max_tokens: int | None = None,
) -> Generator[None, None, list[list[int]]]:
    """Continue each prompt; yields after every token.

    Prompts of similar length are decoded together, with a key-value cache. Finished texts leave the batch.

    Args:
        model: The PEFT model.
        prompts: The prompts.
        limits: Maximum new tokens of each prompt.
        stop: Tokens that end a text; they are not part of it.
        device: Where the model is.
        slots: Adapter of each prompt; None without regimes.
        choose: Chooses the next token of each text, greedily by default.
        on_token: Called with every new token of a text, in order; may end the text.
        max_prompts: Maximum number of prompts decoded together.
        max_tokens: Maximum tokens of prompts and texts decoded together, with padding; None: any number. A longer
            prompt is decoded separately.

    Returns:
        The new token ids of each prompt, in the order of `prompts`.
    """
    outputs = [_Output(i, limit, stop, on_token) for i, limit in enumerate(limits)]
    order = sorted((i for i in range(len(prompts)) if limits[i] > 0), key=lambda i: len(prompts[i].ids))
    for indices in _batches(order, prompts, limits, max_prompts, max_tokens):
        own_slots = None if slots is None else [slots[i] for i in indices]
        texts = _read(model, [prompts[i] for i in indices], device, own_slots, choose)
        yield from _continue(model, texts, [outputs[i] for i in indices], device, choose)
    return [output.tokens for output in outputs]


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


@dataclass
class _Texts:
    """Texts in progress, one per row."""

    last_B1: Tensor
    """Last token of each text, not yet read."""
    positions_B1: Tensor
    """Position of that token."""
    mask_BL: Tensor
    """1 where the cache has a token of the text, 0 for padding."""
    cache: DynamicCache
    context: RoutingContext

    def append(self, token_B: Tensor) -> None:
        """Add the next token of each text."""
        self.last_B1 = token_B[:, None]
        self.positions_B1 = self.positions_B1 + 1
        self.mask_BL = torch.cat([self.mask_BL, torch.ones_like(self.mask_BL[:, :1])], dim=1)

    def keep(self, kept: Sequence[int], device: torch.device) -> None:
        """Drop all other rows."""
        rows = torch.tensor(kept, device=device)
        self.last_B1, self.positions_B1, self.mask_BL = self.last_B1[rows], self.positions_B1[rows], self.mask_BL[rows]
        self.cache.batch_select_indices(rows)
        self.context = _rows_of(self.context, kept, rows)


@dataclass
class _Output:
    """The new tokens of one prompt."""

    index: int
    limit: int
    stop: frozenset[int]
    on_token: OnToken | None
    tokens: list[int] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> bool:
        """Append tokens up to the text's end; return whether the text continues."""
        for token in tokens:
            if token in self.stop:
                return False
            self.tokens.append(token)
            continues = self.on_token is None or self.on_token(self.index, token)
            if not continues or len(self.tokens) == self.limit:
                return False
        return True


def _continue(
    model: Any, texts: _Texts, outputs: Sequence[_Output], device: torch.device, choose: TokenChoice
) -> Generator[None, None, None]:
    """Decode texts whose prompts have been read to their ends."""
    rows = list(outputs)  # texts that have not ended
    unchecked = [texts.last_B1[:, 0]]
    while True:
        left = max(output.limit - len(output.tokens) for output in rows)
        if len(unchecked) == min(left, TOKENS_PER_CHECK.get(device.type, 1)):
            tokens_BT = torch.stack(unchecked, dim=1).tolist()
            kept = [row for row, output in enumerate(rows) if output.extend(tokens_BT[row])]
            unchecked = []
            if 0 < len(kept) < len(rows):
                texts.keep(kept, device)
            rows = [rows[row] for row in kept]
        yield
        if not rows:
            return
        texts.append(choose(_next_logits(model, texts)))
        unchecked.append(texts.last_B1[:, 0])


@torch.no_grad()
def _read(
    model: Any,
    prompts: Sequence[Prompt],
    device: torch.device,
    slots: Sequence[Slot] | None,
    choose: TokenChoice,
) -> _Texts:
    """Read the prompts in one packed pass and find the first token of each text."""
    forward, lengths = model.get_base_model(), [len(prompt.ids) for prompt in prompts]
    ends = list(accumulate(lengths))
    lengths_B = torch.tensor(lengths, device=device)
    packed = DynamicCache()  # without sliding windows, which would end in another record
    sequences = Sequences(
        lengths=tuple(lengths),
        slots=None if slots is None else tuple(slots),
        vision_units=vision_units([prompt.images for prompt in prompts]),
        device=device,
    )
    context = RoutingContext(sequences, decoding=True)
    positions_T = torch.from_numpy(positions(prompts)).to(device)
    features = joined_features([image for prompt in prompts for image in prompt.images], device)
    with routing_context(model, context):
        logits_BV = forward(
            input_ids=torch.tensor([[token for prompt in prompts for token in prompt.ids]], device=device),
            position_ids=positions_T,
            records=Records(lengths),
            past_key_values=packed,
            use_cache=True,
            logits_to_keep=torch.tensor(ends, device=device) - 1,
            **arguments(forward, features),
        ).logits[0]
    # The maximum, not the last: after an image the last token may not have the largest position.
    largest = [int(part.max()) for part in torch.split(positions_T.cpu(), lengths, dim=-1)]
    mask_BL = torch.arange(max(lengths), device=device) >= max(lengths) - lengths_B[:, None]
    texts = _Texts(
        last_B1=choose(logits_BV)[:, None],
        positions_B1=torch.tensor(largest, device=device)[:, None],
        mask_BL=mask_BL.long(),
        cache=_padded(packed, mask_BL, DynamicCache(config=forward.config)),
        context=replace(context, sequences=sequences.of_rows(range(len(prompts)))),
    )
    texts.append(texts.last_B1[:, 0])
    return texts


def _padded(packed: DynamicCache, mask_BL: Tensor, cache: DynamicCache) -> DynamicCache:
    """Fill a cache with a row per record, padded on the left, from one with all records in its only row."""
    source_BL = (mask_BL.flatten().long().cumsum(0) - 1).clamp_min(0).view_as(mask_BL)  # padding is masked: any token
    for number, layer in enumerate(packed.layers):
        keys, values = (tensor_1GTE[0][:, source_BL].transpose(0, 1) for tensor_1GTE in (layer.keys, layer.values))
        cache.update(keys, values, number)
    return cache


@torch.no_grad()
def _next_logits(model: Any, texts: _Texts) -> Tensor:
    """Read the last token of each text; return the logits of the next one, (B, V)."""
    with routing_context(model, texts.context):
        logits_B1V: Tensor = model.get_base_model()(
            input_ids=texts.last_B1,
            attention_mask=texts.mask_BL,
            position_ids=texts.positions_B1,
            past_key_values=texts.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
    return logits_B1V[:, -1]


def _rows_of(context: RoutingContext, kept: Sequence[int], rows_B: Tensor) -> RoutingContext:
    """Select rows of the context of a batch whose prompts have been read; `rows_B` is `kept` on the device."""
    decisions = {
        block: RoutingDecision(d.native_HKT[..., rows_B], d.selected_HKT[..., rows_B], d.gate_HKT[..., rows_B])
        for block, d in context.block_decisions.items()
    }
    assert context.sequences is not None, "set when the prompts were read"
    return replace(context, sequences=context.sequences.of_rows(kept), block_decisions=decisions)
