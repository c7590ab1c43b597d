"""Which experts a head slice is routed to, and their weights.

    a_m = W_m h_m                                          logits, K a head            (1)
    S_m = TopK(a_m, k)                                     exactly k, also under ties  (2)
    g_mj = exp(a_mj) / sum_{q in S_m} exp(a_mq), j in S_m  zero elsewhere              (3)
    p_mj = exp(a_mj) / sum_q exp(a_mq)                     the native probability      (4)

MH-MoE (arXiv 2602.12587) eq. 13; (4) without a selection is LoRAMoE's gate (arXiv 2312.09979, eq. 3). As in
`bottleneck`, tokens are the last dimension.

With k = 1, (3) is the constant 1 and the router gets no gradient from the task loss. Three alternatives, on SuperNI's
order 1 (`python -m benchmarks.learn`: superni-1, 200 records per task, nano backbone, one seed; prequential loss):

    | preset mh-moe                                  | AP   | AF   | loss |
    |------------------------------------------------|------|------|------|
    | straight_through: (3) forward, (4) backward    | .347 | .043 | 3.41 |
    | native: (4) is the gate                        | .352 | .029 | 3.53 |
    | none: the router keeps its initialization      | .358 | .029 | 3.41 |

`native` scales every update by about 1/K and learns more slowly; a trained router forgets more than a frozen one. So
`mh-moe` uses straight_through, because its paper trains the router. `streamlearn` with several experts per head lowers
the router's learning rate to a tenth (`learner.router_lr`): with two, a tenth and a frozen router gave AP .378, .379,
AF .002; one, without a router, gave AP .378, AF .001 (order 1 as above, when regimes claimed experts of one adapter).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from streamlearn.adapters.bottleneck import back_to_tokens, back_to_weights, split_heads
from streamlearn.adapters.presets import HeadLoraConfig

# Shape suffixes: T tokens, D in features, H heads, S = D / H slice, K experts a head.


def logits(x_TD: Tensor, router_HKS: Tensor) -> Tensor:
    """Compute eq. (1), (H, K, T), in float32 or wider."""
    a_HKT: Tensor = _Logits.apply(x_TD, router_HKS)  # type: ignore[no-untyped-call]
    return a_HKT


class _Logits(torch.autograd.Function):
    """Eq. (1) with a backward in the tokens' own dtype and memory layout; autograd's would copy x twice."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, router_HKS: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, router_HKS)
        wide = torch.promote_types(x_TD.dtype, router_HKS.dtype)  # float32: bf16 would tie logits that differ by 0.4 %
        with torch.autocast(x_TD.device.type, enabled=False):
            return torch.bmm(router_HKS.to(wide), split_heads(x_TD.to(wide), len(router_HKS)).mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da_HKT: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, router_HKS = ctx.saved_tensors
        needs_x, needs_router = ctx.needs_input_grad
        da_HKT = da_HKT.to(x_TD.dtype)
        return (
            back_to_tokens(da_HKT, router_HKS.to(x_TD.dtype)) if needs_x else None,
            back_to_weights(da_HKT, x_TD) if needs_router else None,
        )


def select(a_HKT: Tensor, k: int) -> Tensor:
    """Compute eq. (2), a bool mask (H, K, T) with exactly `k` True for every head and token; the first wins a tie."""
    # argmax is 30 times slower than max
    top_HkT = a_HKT.max(1, keepdim=True).indices if k == 1 else a_HKT.topk(k, dim=1).indices
    return torch.zeros_like(a_HKT, dtype=torch.bool).scatter_(1, top_HkT, True)


def gate(a_HKT: Tensor, selected_HKT: Tensor, config: HeadLoraConfig) -> Tensor:
    """Compute the gates (H, K, T) as `config` defines them, given `selected_HKT = select(a_HKT, config.selected)`."""
    if config.gate == "softmax" or config.router_gradient == "native":
        native = a_HKT.softmax(1) * selected_HKT
        return native.detach() if config.router_gradient == "none" else native
    if config.router_gradient == "none":
        return _over_selected(a_HKT.detach(), selected_HKT, config.selected)
    if config.router_gradient == "selected":
        return _over_selected(a_HKT, selected_HKT, config.selected)
    value: Tensor = _StraightThrough.apply(a_HKT, selected_HKT, config.selected)  # type: ignore[no-untyped-call]
    return value


class _StraightThrough(torch.autograd.Function):
    """Eq. (3) forward; backward that of p_mj of eq. (4) for the selected experts, zero for the others.

    da_mj = p_mj (g_mj - sum_{q in S_m} g_mq p_mq),  g_mj the gradient of the gate if selected, else zero    (5)
    """

    @staticmethod
    def forward(ctx: Any, a_HKT: Tensor, selected_HKT: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(a_HKT, selected_HKT)
        return _over_selected(a_HKT, selected_HKT, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgate_HKT: Tensor) -> tuple[Tensor, None, None]:
        a_HKT, selected_HKT = ctx.saved_tensors
        p_HKT, g_HKT = a_HKT.softmax(1), dgate_HKT * selected_HKT
        return p_HKT * (g_HKT - (g_HKT * p_HKT).sum(1, keepdim=True)), None, None


def _over_selected(a_HKT: Tensor, selected_HKT: Tensor, k: int) -> Tensor:
    """Compute eq. (3); over a single expert it is the constant 1."""
    if k == 1:
        return selected_HKT.to(a_HKT.dtype)
    return a_HKT.masked_fill(~selected_HKT, -torch.inf).softmax(1)
