import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamlearn.adapters import HeadLoraConfig, routing

MH_MOE = HeadLoraConfig(num_heads=2, num_experts=4)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@given(st.lists(st.sampled_from([0.0, 1.0, -1.0]), min_size=5, max_size=5), st.integers(1, 5))
def test_exactly_k_are_selected_also_under_ties(values: list[float], k: int) -> None:
    """Equal logits never select more or fewer than k."""
    selected = routing.select(torch.tensor(values).view(1, 5, 1), k)
    assert selected.sum() == k
    assert min(v for v, s in zip(values, selected.flatten(), strict=True) if s) >= sorted(values)[-k]


def test_straight_through_has_the_value_of_the_papers_gate() -> None:
    """Forward is eq. 13 bit for bit, constant 1 for top-1; backward is the native probability's gradient."""
    a = numbers(2, 4, 9).requires_grad_()
    selected = routing.select(a, 1)
    gate = routing.gate(a, selected, MH_MOE)
    assert torch.equal(gate, selected.to(gate.dtype))
    weights = numbers(2, 4, 9)
    (found,) = torch.autograd.grad((gate * weights).sum(), a)
    (expected,) = torch.autograd.grad((a.softmax(1) * selected * weights).sum(), a)
    torch.testing.assert_close(found, expected)


def test_gates_of_the_selected_sum_to_one() -> None:
    """The softmax is over the selected experts only."""
    a = numbers(2, 4, 9)
    gate = routing.gate(a, routing.select(a, 3), HeadLoraConfig(top_k=3))
    torch.testing.assert_close(gate.sum(1), torch.ones(2, 9, dtype=torch.float64))
    assert (gate == 0).sum() == 2 * 9


def test_logits_are_float32_beside_bf16_tokens() -> None:
    """Two experts whose logits bf16 would tie keep their order, also under autocast."""
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    router = torch.tensor([[[1.0, 1.0], [1.0, 1.001]]])
    with torch.autocast("cpu", torch.bfloat16):
        a = routing.logits(x, router)
    assert a.dtype == torch.float32
    assert routing.select(a, 1).flatten().tolist() == [False, True]


def test_gradients_of_the_logits_are_right() -> None:
    """The hand-written backward agrees with finite differences."""
    assert torch.autograd.gradcheck(routing.logits, (numbers(5, 6).requires_grad_(), numbers(2, 3, 3).requires_grad_()))
