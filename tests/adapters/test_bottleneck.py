"""The experts' matrix products against their equations and finite differences."""

import pytest
import torch
from torch import Tensor

from streamlearn.adapters.bottleneck import add_experts, back_to_tokens, back_to_weights, split_heads

# Shape suffixes: T tokens, D in features, O out features, H heads, S = D / H slice, K experts a head, R rank, N any.
T, H, K, R, S, O = 5, 2, 3, 2, 3, 4  # noqa: E741 - as in the shape suffixes


def numbers(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def test_the_output_is_the_sum_over_heads_and_experts() -> None:
    """Eq. (1) and (2), spelled out; the result is written into `y`."""
    y, x, A, B, gate = (
        numbers(*shape).detach() for shape in ((T, O), (T, H * S), (H, K, R, S), (H, K, R, O), (H, K, T))
    )
    expected = y.clone()
    for m in range(H):
        for j in range(K):
            expert_TO = x[:, m * S : (m + 1) * S] @ A[m, j].T @ B[m, j]
            expected += 1.7 * gate[m, j][:, None] * expert_TO
    found = add_experts(y, x, A, B, gate, scaling=1.7)
    torch.testing.assert_close(found, expected)
    assert found.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_of_the_products_are_right(gated: bool) -> None:
    """The hand-written backward agrees with finite differences."""
    y, x, A, B, gate = numbers(T, O), numbers(T, H * S), numbers(H, K, R, S), numbers(H, K, R, O), numbers(H, K, T)
    inputs = (y, x, A, B, gate) if gated else (y, x, A, B)

    def products(y: Tensor, x: Tensor, A: Tensor, B: Tensor, gate: Tensor | None = None) -> Tensor:
        return add_experts(y.clone(), x, A, B, gate, scaling=1.7)

    assert torch.autograd.gradcheck(products, inputs)


def test_gradients_of_a_map_of_the_slices_are_autograds() -> None:
    """`back_to_tokens` and `back_to_weights` are the backward pass of v_m = W_m h_m."""
    x_TD, W_HNS, dv_HNT = numbers(T, H * S), numbers(H, 4, S), numbers(H, 4, T).detach()
    v_HNT = torch.bmm(W_HNS, split_heads(x_TD, H).mT)
    expected = torch.autograd.grad((v_HNT * dv_HNT).sum(), (x_TD, W_HNS))
    found = back_to_tokens(dv_HNT, W_HNS.detach()), back_to_weights(dv_HNT, x_TD.detach())
    torch.testing.assert_close(found, expected)
