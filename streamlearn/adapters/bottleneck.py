"""The experts' arithmetic: two products forward, four backward, and nothing kept that is cheap to make again.

    z_m = G_m * (A_m h_m)                            A_m stacked (K R, S); G_m repeats each gate R times     (1)
    y = y0 + scaling * [B_1 ... B_H] [z_1; ...; z_H]                                                         (2)

With dy the gradient of y and u_m = scaling * B_m^T dy:

    dB_m = scaling * dy z_m^T,   dA_m = (G_m * u_m) h_m^T,   dh_m = A_m^T (G_m * u_m)                        (3)
    dg_mj = sum over the rank of u_mj * (A_mj h_m)                                                           (4)

Between A and B tokens lie in the last dimension: gates then scale long contiguous rows, which on a CPU is many times
faster than rows of R numbers, and the products take either order.
"""
# Shape suffixes: T tokens, D in features, O out features, H heads, S = D / H slice, K experts a head, R rank.

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def add_experts(
    y_TO: Tensor, x_TD: Tensor, A_HKRS: Tensor, B_HKRO: Tensor, gate_HKT: Tensor | None, scaling: float
) -> Tensor:
    """Eq. (2), in the precision of `y_TO`; without a gate every expert counts fully."""
    y: Tensor = _Experts.apply(y_TO, x_TD, A_HKRS, B_HKRO, gate_HKT, scaling)  # type: ignore[no-untyped-call]
    return y


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_TO: Tensor, x_TD: Tensor, A_HKRS: Tensor, B_HKRO: Tensor, gate_HKT: Tensor | None, scaling: float
    ) -> Tensor:
        A_HKRS, B_HKRO = A_HKRS.to(y_TO.dtype), B_HKRO.to(y_TO.dtype)  # float32 is for the optimizer's small steps
        down_HKRT = _down(x_TD, A_HKRS)
        z_HKRT = _gated(down_HKRT, gate_HKT)
        ctx.save_for_backward(x_TD, A_HKRS, B_HKRO, down_HKRT, gate_HKT)
        ctx.scaling = scaling
        return torch.addmm(y_TO, z_HKRT.flatten(0, 2).T, B_HKRO.flatten(0, 2), alpha=scaling)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, A_HKRS, B_HKRO, down_HKRT, gate_HKT = ctx.saved_tensors
        _, needs_x, needs_A, needs_B, needs_gate, _ = ctx.needs_input_grad
        u_HKRT = torch.mm(B_HKRO.flatten(0, 2), dy_TO.T).mul_(ctx.scaling).view_as(down_HKRT)
        v_HKRT = _gated(u_HKRT, gate_HKT)
        return (
            dy_TO,
            _dx(v_HKRT, A_HKRS) if needs_x else None,
            _dA(v_HKRT, x_TD).view_as(A_HKRS) if needs_A else None,
            _dB(_gated(down_HKRT, gate_HKT), dy_TO, ctx.scaling).view_as(B_HKRO) if needs_B else None,
            (u_HKRT * down_HKRT).sum(2, dtype=gate_HKT.dtype) if needs_gate else None,
            None,
        )


def _gated(a_HKRT: Tensor, gate_HKT: Tensor | None) -> Tensor:
    return a_HKRT if gate_HKT is None else a_HKRT * gate_HKT.to(a_HKRT.dtype).unsqueeze(2)


def _heads(x_TD: Tensor, num_heads: int) -> Tensor:
    return x_TD.view(len(x_TD), num_heads, -1).transpose(0, 1)  # (H, T, S)


def _down(x_TD: Tensor, A_HKRS: Tensor) -> Tensor:
    H, K, R, S = A_HKRS.shape
    down_HTB = torch.bmm(_heads(x_TD, H), A_HKRS.view(H, K * R, S).mT)  # tokens first: in bf16 twice as fast
    return down_HTB.mT.contiguous().view(H, K, R, -1)


def _dx(v_HKRT: Tensor, A_HKRS: Tensor) -> Tensor:
    H, K, R, S = A_HKRS.shape
    dh_HTS = torch.bmm(v_HKRT.view(H, K * R, -1).mT, A_HKRS.view(H, K * R, S))
    return dh_HTS.transpose(0, 1).reshape(-1, H * S)


def _dA(v_HKRT: Tensor, x_TD: Tensor) -> Tensor:
    H = len(v_HKRT)
    return torch.bmm(v_HKRT.view(H, -1, len(x_TD)), _heads(x_TD, H))


def _dB(z_HKRT: Tensor, dy_TO: Tensor, scaling: float) -> Tensor:
    return torch.mm(z_HKRT.flatten(0, 2), dy_TO).mul_(scaling)
