"""The experts' matrix products: two forward, four backward; whatever is cheap to recompute is not stored.

    z_m = G_m * (A_m h_m)                            A_m stacked (K R, S); G_m repeats each gate R times     (1)
    y = y0 + scaling * [B_1 ... B_H] [z_1; ...; z_H]                                                         (2)

With dy the gradient of y and u_m = scaling * B_m^T dy:

    dB_m = scaling * dy z_m^T,   dA_m = (G_m * u_m) h_m^T,   dh_m = A_m^T (G_m * u_m)                        (3)
    dg_mj = sum over the rank of u_mj * (A_mj h_m)                                                           (4)

Between A and B the tokens are the last dimension. Gates then scale long contiguous rows, which on a CPU is many times
faster than scaling rows of R numbers; the matrix products run equally fast in either layout.
"""
# Shape suffixes: T tokens, D in features, O out features, H heads, S = D / H slice, K experts a head, R rank, N any.

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from streamlearn.adapters.usable import rows, take


def add_experts(
    y: Tensor,
    x: Tensor,
    A_HKRS: Tensor,
    B_HKRO: Tensor,
    gate_HUT: Tensor | None,
    usable_HU: Tensor | None = None,
    *,
    scaling: float,
) -> Tensor:
    """Compute eq. (2): add the experts' output to `y` in place, in the dtype of `y`.

    Args:
        y: Output of the frozen linear, (..., O). Overwritten.
        x: Its input, (..., D).
        A_HKRS: Down projections of all experts.
        B_HKRO: Up projections of all experts.
        gate_HUT: Gates of the experts that are computed; None gives each weight 1.
        usable_HU: The experts to compute, see `usable`; None: all.
        scaling: alpha / r.

    Returns:
        `y`.
    """
    added: Tensor = _Experts.apply(y, x, A_HKRS, B_HKRO, gate_HUT, usable_HU, scaling)  # type: ignore[no-untyped-call]
    return added


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(  # autograd passes by position
        ctx: Any,
        y: Tensor,
        x: Tensor,
        A_HKRS: Tensor,
        B_HKRO: Tensor,
        gate_HKT: Tensor | None,
        usable_HU: Tensor | None,
        scaling: float,
    ) -> Tensor:
        x_TD, y_TO = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        ctx.shapes = A_HKRS.shape, B_HKRO.shape
        A_HKRS, B_HKRO = take(A_HKRS, usable_HU), take(B_HKRO, usable_HU)
        A_HKRS, B_HKRO = A_HKRS.to(y.dtype), B_HKRO.to(y.dtype)  # stored in float32 for the optimizer's small steps
        ctx.gate_dtype = None if gate_HKT is None else gate_HKT.dtype
        gate_HKT = None if gate_HKT is None else gate_HKT.to(y.dtype)
        down_HKRT = _down(x_TD, A_HKRS)
        z_HKRT = _gated(down_HKRT, gate_HKT)
        ctx.save_for_backward(x_TD, A_HKRS, B_HKRO, down_HKRT, gate_HKT, usable_HU)
        ctx.scaling, ctx.x_shape = scaling, x.shape
        y_TO.addmm_(z_HKRT.flatten(0, 2).T, B_HKRO.flatten(0, 2), alpha=scaling)  # in place: allocating is slower
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, A_HKRS, B_HKRO, down_HKRT, gate_HKT, usable_HU = ctx.saved_tensors
        _, needs_x, needs_A, needs_B, needs_gate, *_ = ctx.needs_input_grad
        A_shape, B_shape = ctx.shapes
        dy_TO = dy.reshape(-1, dy.shape[-1])
        u_HKRT = torch.mm(B_HKRO.flatten(0, 2), dy_TO.T).mul_(ctx.scaling).view_as(down_HKRT)
        v_HKRT = _gated(u_HKRT, gate_HKT)
        return (
            dy,
            back_to_tokens(v_HKRT.flatten(1, 2), A_HKRS.flatten(1, 2)).view(ctx.x_shape) if needs_x else None,
            _put(back_to_weights(v_HKRT.flatten(1, 2), x_TD).view_as(A_HKRS), usable_HU, A_shape) if needs_A else None,
            _put(_dB(_gated(down_HKRT, gate_HKT), dy_TO, ctx.scaling).view_as(B_HKRO), usable_HU, B_shape)
            if needs_B
            else None,
            (u_HKRT * down_HKRT).sum(2, dtype=ctx.gate_dtype) if needs_gate else None,
            None,
            None,
        )


def _put(part_HU: Tensor, usable_HU: Tensor | None, shape: torch.Size) -> Tensor:
    """The gradient of all experts from that of the computed ones: zero for the others."""
    if usable_HU is None:
        return part_HU
    whole = part_HU.new_zeros(shape)
    whole[rows(usable_HU), usable_HU] = part_HU
    return whole


def split_heads(x_TD: Tensor, num_heads: int) -> Tensor:
    """Split the tokens into head slices h_m: (H, T, S), a view."""
    return x_TD.view(len(x_TD), num_heads, -1).transpose(0, 1)


def back_to_tokens(v_HNT: Tensor, W_HNS: Tensor) -> Tensor:
    """Backpropagate through v_m = W_m h_m to the tokens: (T, D)."""
    return torch.bmm(v_HNT.mT, W_HNS).transpose(0, 1).reshape(v_HNT.shape[-1], -1)


def back_to_weights(v_HNT: Tensor, x_TD: Tensor) -> Tensor:
    """Backpropagate through v_m = W_m h_m to the weights: (H, N, S)."""
    return torch.bmm(v_HNT, split_heads(x_TD, len(v_HNT)))


def _gated(a_HKRT: Tensor, gate_HKT: Tensor | None) -> Tensor:
    return a_HKRT if gate_HKT is None else a_HKRT * gate_HKT.unsqueeze(2)


def _down(x_TD: Tensor, A_HKRS: Tensor) -> Tensor:
    H, K, R, S = A_HKRS.shape
    down_HTB = torch.bmm(split_heads(x_TD, H), A_HKRS.view(H, K * R, S).mT)  # tokens first: twice as fast in bf16
    return down_HTB.mT.contiguous().view(H, K, R, -1)


def _dB(  # noqa: N802
    z_HKRT: Tensor, dy_TO: Tensor, scaling: float
) -> Tensor:
    return torch.mm(z_HKRT.flatten(0, 2), dy_TO).mul_(scaling)
