"""Which experts a new regime may use.

    cost_mk = n_mk (1 - h_mk)                                                                  (1)

n_mk is how many remembered regimes have claimed expert k of head m, h_mk its CKA with the regime's transient expert
(CP-MoE, arXiv 2605.20247, eq. 9). A head claims its cheapest experts: an unclaimed one costs nothing, and when all are
taken one that computes what the newcomer needs (h near 1) costs little, so dissimilar regimes keep apart and similar
ones share. Ties go to the higher h, then to a draw.

With H heads of K experts, and one claim a head, K regimes have experts all of their own; beyond that each further
regime shares in every head, but with another earlier regime in each, as h falls out there: of K^H combinations it
meets the same neighbour in all heads only by likeness. What is shared, importance protects.

How gently it degrades, on 4 experts a head, one budget, in one stream of 23 tasks (`streamlearn bench learn --suite
long`, 200 records a task, one seed), examined after 8, 15 and 23 regimes; compare in a column, for the tasks differ:

    |             | 8         | 15        | 23        |
    | streamlearn | .379 .000 | .431 .002 | .412 .005 |  AP, AF
    | lora        | .305 .078 | .348 .090 | .219 .225 |
"""
# Shape suffixes: H heads, K experts a head.

import torch
from torch import Tensor

MARGIN = 100.0
"""What a claim is worth in logits: a native logit of this size would be a router gone wild."""


def claim(claims_HK: Tensor, similarity_HK: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Bool (H, K) with `num` experts in each head, by eq. (1)."""
    num_experts = claims_HK.shape[1]
    draw_HK = torch.rand(claims_HK.shape, generator=generator, dtype=torch.float64).to(claims_HK.device)
    cost_HK = claims_HK.double() * (1 - similarity_HK.double())
    # Ties are real (an unclaimed expert costs exactly 0); the two terms below are far smaller than a CKA's noise.
    cost_HK = cost_HK - 1e-6 * similarity_HK.double() + 1e-9 * draw_HK
    chosen = cost_HK.topk(min(num, num_experts), dim=1, largest=False).indices
    return torch.zeros_like(claims_HK, dtype=torch.bool).scatter_(1, chosen, value=True)


def as_bias(claimed_HK: Tensor) -> Tensor:
    """The bias that keeps every token inside what is claimed: 0 there, -MARGIN elsewhere."""
    return torch.where(claimed_HK, 0.0, -MARGIN)


def claimed(bias_HKN: Tensor) -> Tensor:
    """The inverse for all slots, (H, K, N); a slot without claims has none anywhere."""
    return (bias_HKN == 0) & (bias_HKN < 0).any(1, keepdim=True)
