"""Reference implementation of the layer from the papers' equations, one head and one expert at a time."""

import torch
from torch import Tensor

from streamlearn.adapters.presets import HeadLoraConfig

# Shape suffixes: T tokens, D in features, O out features, H heads, S = D / H slice, K experts a head, R rank.


def forward(  # names as in eq. 12-16
    x_TD: Tensor, y_TO: Tensor, A_HKRS: Tensor, B_HKRO: Tensor, router_HKS: Tensor | None, config: HeadLoraConfig
) -> Tensor:
    """MH-MoE eq. 12-16, added to `y_TO`, the output of the frozen linear."""
    for m, h_TS in enumerate(x_TD.chunk(config.num_heads, dim=-1)):  # eq. 12
        for j in range(config.num_experts):
            expert_TO = h_TS @ A_HKRS[m, j].T @ B_HKRO[m, j]  # eq. 14
            gate_T = expert_TO.new_ones(len(x_TD)) if router_HKS is None else gates(h_TS, router_HKS[m], config)[:, j]
            y_TO = y_TO + config.alpha / config.r * gate_T[:, None] * expert_TO  # eq. 15, 16
    return y_TO


def gates(h_TS: Tensor, router_KS: Tensor, config: HeadLoraConfig) -> Tensor:
    """MH-MoE eq. 13 or the native probability, with the gradient that the configuration defines."""
    a_TK = h_TS @ router_KS.T
    selected_TK = torch.zeros_like(a_TK, dtype=torch.bool)
    for a_K, chosen in zip(a_TK, selected_TK, strict=True):
        for j in sorted(range(len(a_K)), key=lambda j: (-a_K[j].item(), j))[: config.selected]:
            chosen[j] = True
    exp_TK = a_TK.exp()
    native_TK = exp_TK / exp_TK.sum(-1, keepdim=True) * selected_TK
    if config.gate == "softmax" or config.router_gradient == "native":
        return native_TK.detach() if config.router_gradient == "none" else native_TK
    eq13_TK = exp_TK * selected_TK / (exp_TK * selected_TK).sum(-1, keepdim=True)
    if config.router_gradient == "selected":
        return eq13_TK
    eq13_TK = eq13_TK.detach()
    return eq13_TK if config.router_gradient == "none" else eq13_TK + native_TK - native_TK.detach()
