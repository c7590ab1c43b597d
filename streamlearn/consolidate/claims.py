"""The experts that a new regime may use.

    cost_mk = n_mk (1 - h_mk)                                                                  (1)

n_mk is the number of remembered regimes that have claimed expert k of head m, h_mk its CKA with the regime's transient
expert (CP-MoE, arXiv 2605.20247, eq. 9). A head claims its cheapest experts. An unclaimed expert costs nothing. When
all are claimed, one that already computes what the regime needs (h near 1) costs little, so similar regimes share
experts and dissimilar ones do not. Ties are broken by the higher h, then at random.

With H heads of K experts and one claim per head, the first K regimes have experts of their own. Each further regime
shares an expert in every head. h is computed per head, so the heads choose different earlier regimes to share with:
of the K^H combinations, a regime shares all experts with one other regime only if the two are similar. Importance
protects shared experts.

Degradation with 4 experts per head and a fixed budget, on one stream of 23 tasks (`streamlearn bench learn --suite
long`, 200 records per task, one seed), evaluated after 8, 15 and 23 regimes. Tasks differ between the columns, so
compare within a column:

    |             | 8         | 15        | 23        |
    | streamlearn | .379 .000 | .431 .002 | .412 .005 |  AP, AF
    | lora        | .305 .078 | .348 .090 | .219 .225 |
"""
# Shape suffixes: H heads, K experts a head.

import torch
from torch import Tensor

from streamlearn.adapters.usable import MARGIN


def claim(claims_HK: Tensor, similarity_HK: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Claim the `num` cheapest experts of each head by eq. (1).

    Args:
        claims_HK: Number of regimes that have claimed each expert.
        similarity_HK: CKA of each expert with the regime's transient expert, in [0, 1].
        num: Experts to claim per head; all if there are fewer.
        generator: Breaks the last ties.

    Returns:
        Bool (H, K), True for claimed experts.
    """
    num_experts = claims_HK.shape[1]
    draw_HK = torch.rand(claims_HK.shape, generator=generator, dtype=torch.float64).to(claims_HK.device)
    cost_HK = claims_HK.double() * (1 - similarity_HK.double())
    # Ties are common (an unclaimed expert costs exactly 0); the two terms below are far smaller than the noise of CKA.
    cost_HK = cost_HK - 1e-6 * similarity_HK.double() + 1e-9 * draw_HK
    chosen = cost_HK.topk(min(num, num_experts), dim=1, largest=False).indices
    return torch.zeros_like(claims_HK, dtype=torch.bool).scatter_(1, chosen, value=True)


def as_bias(claimed_HK: Tensor) -> Tensor:
    """Return the bias that restricts routing to the claimed experts, (H, K): 0 for them, -MARGIN for the others."""
    return torch.where(claimed_HK, 0.0, -MARGIN)


def claimed(bias_HKN: Tensor) -> Tensor:
    """Recover the claims of all slots from their biases: bool (H, K, N), all False for a slot without claims."""
    return (bias_HKN == 0) & (bias_HKN < 0).any(1, keepdim=True)
