"""Attention over a packed batch: records are concatenated, and no record attends to another.

Registered with transformers under the name `packed`. When a forward pass has `records`, attention is causal within each
of them: the cost is the sum of the squared lengths rather than the square of their sum, and no mask is built. On a GPU
in half precision one kernel takes all records; elsewhere, and where values have another head size than queries (in
multi-head latent attention), they are computed one after another. Every other pass (generation with a cache, padded
batches) uses transformers' own `sdpa`.
"""
# Shape suffixes: B sequences (1 when packed), H query heads, G key-value heads, T tokens, E head size.

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "packed"
BLOCK = 128
"""Queries per block of plain matrix products, which replace the fused kernel in bfloat16 on a CPU. Forward and
backward take 0.36 to 0.57 of its time at 64 to 800 tokens (9 query and 3 key heads of 64, AVX512-BF16, one thread)."""


class Records:
    """The lengths of the records in a packed pass, known on the host: no layer asks the device for them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.ends = (0, *accumulate(lengths))
        """Where the records begin and end: cumulative lengths from 0."""
        self.longest = max(lengths)
        self._on_device: Tensor | None = None

    def ends_on(self, device: torch.device) -> Tensor:
        """`ends`, int32, copied once for all layers."""
        if self._on_device is None:
            self._on_device = torch.tensor(self.ends, dtype=torch.int32).to(device, non_blocking=True)
        return self._on_device


def packed_attention(
    module: torch.nn.Module,
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    records: Records | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each record of a packed batch: (B, T, H, E), contiguous, as transformers expects it.

    Raises:
        NotImplementedError: there are `records`, and the attention is not causal within each of them and nothing else.
    """
    if records is None:
        if attention_mask is None and sliding_window is not None and query_BHTE.shape[2] > sliding_window:
            attention_mask = band_mask(query_BHTE.shape[2], sliding_window, query_BHTE.device)
        output, _ = sdpa_attention_forward(
            module, query_BHTE, key_BGTE, value_BGTE, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    if obstacle := _obstacle(module, attention_mask, kwargs):
        raise NotImplementedError(obstacle)
    same_size = query_BHTE.shape[-1] == value_BGTE.shape[-1]  # the kernel takes one head size
    if query_BHTE.is_cuda and query_BHTE.dtype != torch.float32 and same_size:
        return _by_one_kernel(query_BHTE, key_BGTE, value_BGTE, records, scaling, sliding_window), None
    pieces = [
        _attend_one(
            query_BHTE[:, :, start:end],
            key_BGTE[:, :, start:end],
            value_BGTE[:, :, start:end],
            scaling=scaling,
            sliding_window=sliding_window,
        ).transpose(1, 2)
        for start, end in pairwise(records.ends)
    ]
    return torch.cat(pieces, dim=1).contiguous(), None  # as a rule contiguous already: one copy, not two


def _obstacle(module: torch.nn.Module, attention_mask: Tensor | None, kwargs: Mapping[str, Any]) -> str | None:
    """What a packed pass would leave out."""
    if attention_mask is not None:  # `_mask` makes none in a packed pass
        return "attention with a mask of its own"
    if added := [name for name in ("position_bias", "softcap", "s_aux") if kwargs.get(name) is not None]:
        return f"attention with {added[0]}"
    given = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if given is None else given):  # as transformers' own
        return "attention that is not causal"
    return None


def _by_one_kernel(
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    records: Records,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """All records at once, B = 1, by flash attention's kernel for sequences of different lengths: (1, T, H, E).

    Keys and values are repeated for the query heads that share them: torch 2.11 takes no groups here.
    """
    queries_per_key = query_BHTE.shape[1] // key_BGTE.shape[1]
    query_THE = query_BHTE[0].transpose(0, 1).contiguous()
    key_THE, value_THE = (x[0].transpose(0, 1).repeat_interleave(queries_per_key, 1) for x in (key_BGTE, value_BGTE))
    ends = records.ends_on(query_BHTE.device)
    output = varlen_attn(
        query_THE,
        key_THE,
        value_THE,
        ends,
        ends,
        records.longest,
        records.longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),  # to the left, besides the token itself
    )
    assert isinstance(output, Tensor), "the scores' sums were not asked for"
    return output[None]


def _attend_one(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None
) -> Tensor:
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if sliding_window is not None and length > sliding_window:
        mask = band_mask(length, sliding_window, query.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        return _by_products(query, key, value, scaling)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)


def _by_products(query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor, scaling: float | None) -> Tensor:
    """Causal attention of one record, B = 1, a block of queries at a time; softmax in float32.

    Values may have another head size than queries and keys; the output has theirs.
    """
    B, H, T, E = query_BHTE.shape
    G, value_size = key_BGTE.shape[1], value_BGTE.shape[-1]
    scale = E**-0.5 if scaling is None else scaling
    query_GNTE = (query_BHTE * scale).view(B * G, H // G, T, E)  # the heads of a group share keys without a copy
    key_GTE, value_GTE = key_BGTE.reshape(B * G, T, E), value_BGTE.reshape(B * G, T, value_size)
    later_TT = torch.ones(min(T, BLOCK), min(T, BLOCK), dtype=torch.bool).triu_(1)
    blocks = []
    for start in range(0, T, BLOCK):
        end = min(start + BLOCK, T)
        size = end - start
        query = query_GNTE[:, :, start:end].reshape(B * G, -1, E)
        scores = torch.bmm(query, key_GTE[:, :end].mT).view(B * G, H // G, size, end)
        scores[..., start:].masked_fill_(later_TT[:size, :size], float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        output = torch.bmm(weights.view(B * G, -1, end), value_GTE[:, :end])
        blocks.append(output.view(B * G, H // G, size, value_size))
    return torch.cat(blocks, dim=2).view(B, H, T, value_size)


def band_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return a (T, T) bool mask: token t attends to t - window + 1 ... t."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


def _mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask where `packed_attention` needs none: a whole, unpadded, uncached sequence."""
    if q_length == kv_length and attention_mask is None:
        return None
    mask: Tensor | None = sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)
    return mask


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _mask)
