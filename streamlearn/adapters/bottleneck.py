"""The experts' matrix products: two forward, four backward; whatever is cheap to recompute is not stored.

    z_m = G_m * (A_m h_m)                            A_m stacked (K R, S); G_m repeats each gate R times     (1)
    y = y0 + scaling * [B_1 ... B_H] [z_1; ...; z_H]                                                         (2)

With dy the gradient of y and u_m = scaling * B_m^T dy:

    dB_m = scaling * dy z_m^T,   dA_m = (G_m * u_m) h_m^T,   dh_m = A_m^T (G_m * u_m)                        (3)
    dg_mj = sum over the rank of u_mj * (A_mj h_m)                                                           (4)

Between A and B the tokens are the last dimension. Gates then scale long contiguous rows, which on a CPU is many times
faster than scaling rows of R numbers; the matrix products run equally fast in either layout.
"""
# Shape suffixes: T tokens, P those that the experts apply to, D in features, O out features, H heads, S = D / H slice,
# K experts a head, R rank, N any.

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def add_experts(
    y: Tensor,
    x: Tensor,
    A_HKRS: Tensor,
    B_HKRO: Tensor,
    gate_HKP: Tensor | None,
    tokens_P: Tensor | None = None,
    *,
    scaling: float,
) -> Tensor:
    """Compute eq. (2): add the experts' output to `y` in place, in the dtype of `y`.

    Args:
        y: Output of the frozen linear, (..., O). Overwritten.
        x: Its input, (..., D).
        A_HKRS: Down projections.
        B_HKRO: Up projections.
        gate_HKP: Gates of the tokens that the experts apply to; None gives each expert weight 1.
        tokens_P: Indices of those tokens in the flattened input, distinct; None: all.
        scaling: alpha / r.

    Returns:
        `y`.
    """
    if not torch.is_grad_enabled():  # torch.compile cannot trace the function below without a gradient
        _add(y, x, A_HKRS.to(y.dtype), B_HKRO.to(y.dtype), gate_HKP, tokens_P, scaling)
        return y
    added: Tensor = _Experts.apply(y, x, A_HKRS, B_HKRO, gate_HKP, tokens_P, scaling)  # type: ignore[no-untyped-call]
    return added


def _add(
    y: Tensor,
    x: Tensor,
    A_HKRS: Tensor,
    B_HKRO: Tensor,
    gate_HKP: Tensor | None,
    tokens_P: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute eq. (1) and (2) in place, and return what the backward pass needs: x_PD, A_m h_m and the gates."""
    x_PD, y_TO = rows_of(x.reshape(-1, x.shape[-1]), tokens_P), y.view(-1, y.shape[-1])
    gate_HKP = None if gate_HKP is None else gate_HKP.to(y.dtype)
    down_HKRP = _down(x_PD, A_HKRS)
    z_HKRP = _gated(down_HKRP, gate_HKP)
    z_PN, B_NO = z_HKRP.flatten(0, 2).T, B_HKRO.flatten(0, 2)
    if tokens_P is None:
        y_TO.addmm_(z_PN, B_NO, alpha=scaling)  # in place: allocating is slower
    else:
        y_TO.index_add_(0, tokens_P, z_PN @ B_NO, alpha=scaling)
    return x_PD, down_HKRP, gate_HKP


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(  # autograd passes by position
        ctx: Any,
        y: Tensor,
        x: Tensor,
        A_HKRS: Tensor,
        B_HKRO: Tensor,
        gate_HKP: Tensor | None,
        tokens_P: Tensor | None,
        scaling: float,
    ) -> Tensor:
        A_HKRS, B_HKRO = A_HKRS.to(y.dtype), B_HKRO.to(y.dtype)  # stored in float32 for the optimizer's small steps
        ctx.gate_dtype = None if gate_HKP is None else gate_HKP.dtype
        x_PD, down_HKRP, gate_HKP = _add(y, x, A_HKRS, B_HKRO, gate_HKP, tokens_P, scaling)
        ctx.save_for_backward(x_PD, A_HKRS, B_HKRO, down_HKRP, gate_HKP, tokens_P)
        ctx.scaling, ctx.x_shape = scaling, x.shape
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_PD, A_HKRS, B_HKRO, down_HKRP, gate_HKP, tokens_P = ctx.saved_tensors
        _, needs_x, needs_A, needs_B, needs_gate, *_ = ctx.needs_input_grad
        dy_PO = rows_of(dy.reshape(-1, dy.shape[-1]), tokens_P)
        u_HKRP = torch.mm(B_HKRO.flatten(0, 2), dy_PO.T).mul_(ctx.scaling).view_as(down_HKRP)
        v_HKRP = _gated(u_HKRP, gate_HKP)
        return (
            dy,
            _dx(back_to_tokens(v_HKRP.flatten(1, 2), A_HKRS.flatten(1, 2)), tokens_P, ctx.x_shape) if needs_x else None,
            back_to_weights(v_HKRP.flatten(1, 2), x_PD).view_as(A_HKRS) if needs_A else None,
            _dB(_gated(down_HKRP, gate_HKP), dy_PO, ctx.scaling).view_as(B_HKRO) if needs_B else None,
            (u_HKRP * down_HKRP).sum(2, dtype=ctx.gate_dtype) if needs_gate else None,
            None,
            None,
        )


def rows_of(tensor_TN: Tensor, tokens_P: Tensor | None) -> Tensor:
    """Return the rows of some tokens, (P, N); for None the tensor itself."""
    return tensor_TN if tokens_P is None else tensor_TN[tokens_P]


def _dx(dx_PD: Tensor, tokens_P: Tensor | None, shape: torch.Size) -> Tensor:
    """Give the gradient the shape of x; it is zero for all other tokens."""
    if tokens_P is None:
        return dx_PD.view(shape)
    dx_TD = dx_PD.new_zeros(shape).view(-1, shape[-1])
    dx_TD[tokens_P] = dx_PD
    return dx_TD.view(shape)


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
