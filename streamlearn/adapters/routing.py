"""Which experts a head slice goes to, and how much each counts.

    a_m = W_m h_m                                          logits, K a head            (1)
    S_m = TopK(a_m, k)                                     exactly k, also under ties  (2)
    g_mj = exp(a_mj) / sum_{q in S_m} exp(a_mq), j in S_m  zero elsewhere              (3)
    p_mj = exp(a_mj) / sum_q exp(a_mq)                     the native probability      (4)

MH-MoE (arXiv 2602.12587) eq. 13; (4) without a selection is LoRAMoE's gate (arXiv 2312.09979, eq. 3). As in
`bottleneck`, tokens lie in the last dimension.
"""
# Shape suffixes: T tokens, D in features, H heads, S = D / H slice, K experts a head.

import torch
from torch import Tensor

from streamlearn.adapters.config import HeadLoraConfig


def logits(x_TD: Tensor, router_HKS: Tensor) -> Tensor:
    """Eq. (1), as (H, K, T)."""
    wide = torch.promote_types(x_TD.dtype, router_HKS.dtype)  # float32: bf16 would tie logits that differ by 0.4 %
    h_HST = x_TD.to(wide).view(len(x_TD), len(router_HKS), -1).permute(1, 2, 0)
    with torch.autocast(x_TD.device.type, enabled=False):
        return torch.bmm(router_HKS.to(wide), h_HST)


def select(a_HKT: Tensor, k: int) -> Tensor:
    """Eq. (2) as a bool mask with exactly `k` True for every head and token; the first wins a tie."""
    chosen = a_HKT.max(1, keepdim=True).indices if k == 1 else a_HKT.topk(k, dim=1).indices  # argmax is 30 times slower
    return torch.zeros_like(a_HKT, dtype=torch.bool).scatter_(1, chosen, True)


def gate(a_HKT: Tensor, selected_HKT: Tensor, config: HeadLoraConfig) -> Tensor:
    """The weight of every expert, zero where not selected; `config` says which of (3) and (4), and the gradient."""
    native = a_HKT.softmax(1) * selected_HKT
    if config.gate == "softmax" or config.router_gradient == "native":
        return native.detach() if config.router_gradient == "none" else native
    value = a_HKT.detach().masked_fill(~selected_HKT, -torch.inf).softmax(1)
    if config.router_gradient == "none":
        return value
    return value + (native - native.detach())  # straight-through: adds an exact zero, and the gradient of (4)
