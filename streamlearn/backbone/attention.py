"""Attention over a packed row: several records behind one another, none of which sees another.

Registered with transformers under the name `packed`. When a forward pass carries `cu_seq_lens_q` (0, end of record 1,
end of record 2, ...; the name is that of flash attention's variable-length kernels), each record is attended to on its
own, causally: cost grows with the sum of squared lengths, not with the square of the sum, and no mask is built. Any
other pass (generation with a cache, padded batches) is transformers' own `sdpa`.
"""
# Shape suffixes: B rows (1 when packed), H query heads, G key-value heads, T tokens, E head size.

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "packed"


def packed_attention(
    module: torch.nn.Module,
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each record of a packed row. Returns (B, T, H, E), the layout that transformers expects."""
    if cu_seq_lens_q is None:
        if attention_mask is None and sliding_window is not None and query_BHTE.shape[2] > sliding_window:
            attention_mask = band_mask(query_BHTE.shape[2], sliding_window, query_BHTE.device)
        output, _ = sdpa_attention_forward(
            module, query_BHTE, key_BGTE, value_BGTE, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    bounds: list[int] = cu_seq_lens_q.tolist()
    pieces = [
        _attend_one(
            query_BHTE[:, :, start:end],
            key_BGTE[:, :, start:end],
            value_BGTE[:, :, start:end],
            scaling=scaling,
            sliding_window=sliding_window,
        )
        for start, end in pairwise(bounds)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def _attend_one(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None
) -> Tensor:
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if sliding_window is not None and length > sliding_window:
        mask = band_mask(length, sliding_window, query.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)


def band_mask(length: int, window: int, device: torch.device) -> Tensor:
    """(T, T) bool: token t sees t - window + 1 ... t."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


def _mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask where `packed_attention` needs none: a whole, unpadded, uncached row."""
    if q_length == kv_length and attention_mask is None:
        return None
    mask: Tensor | None = sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)
    return mask


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _mask)
