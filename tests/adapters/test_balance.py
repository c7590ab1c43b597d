import pytest
import torch
from torch import Tensor

from streamlearn.adapters import routing
from streamlearn.adapters.balance import NO_TYPE, load_balance, localized_balance

# Shape suffixes: T tokens, H heads, K experts a head, M samples.
LENGTHS = (5, 1, 9, 3)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def samples() -> Tensor:
    """Sample of each token, for four packed samples."""
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


def aux(a_HKT: Tensor, selected_HKT: Tensor) -> float:
    """CP-MoE eq. 12 spelled out."""
    H, K, T = a_HKT.shape
    total = 0.0
    for h in range(H):
        for i in range(K):
            f = sum(bool(selected_HKT[h, i, t]) for t in range(T)) / T
            P = sum(a_HKT[h, i, t].exp() / sum(a_HKT[h, j, t].exp() for j in range(K)) for t in range(T)) / T
            total += f * float(P) / H
    return total


@pytest.mark.parametrize("k", [1, 2, 4])
def test_load_balance_equals_the_equation(k: int) -> None:
    """Counts of the selected tokens times the mean of the softmax over all experts."""
    a_HKT = numbers(2, 4, 7)
    selected_HKT = routing.select(a_HKT, k)
    torch.testing.assert_close(load_balance(a_HKT, selected_HKT).item(), aux(a_HKT, selected_HKT))


def test_a_routing_bias_reaches_f_and_never_p() -> None:
    """A bias that reroutes every token changes the counts; probabilities and gradient are those of native logits."""
    a_HKT = numbers(2, 4, 7).requires_grad_()
    bias_K = torch.tensor([0.0, 50.0, 0.0, 0.0], dtype=torch.float64)
    biased_HKT = routing.select(a_HKT + bias_K[:, None], 1)
    assert biased_HKT[:, 1].all()
    P_HK = a_HKT.softmax(1).mean(-1)
    torch.testing.assert_close(load_balance(a_HKT, biased_HKT), P_HK[:, 1].mean())
    (found,) = torch.autograd.grad(load_balance(a_HKT, biased_HKT), a_HKT)
    (expected,) = torch.autograd.grad(P_HK[:, 1].mean(), a_HKT)
    torch.testing.assert_close(found, expected)


def test_even_load_is_the_balanced_value() -> None:
    """Uniform counts and probabilities give k / K; all tokens on one expert with probability 1 give 1."""
    even = torch.eye(4, dtype=torch.bool).expand(2, 4, 4)
    torch.testing.assert_close(load_balance(torch.zeros(2, 4, 4), even), torch.tensor(0.25))
    one = torch.zeros(2, 4, 4)
    one[:, 0] = 100.0
    torch.testing.assert_close(load_balance(one, routing.select(one, 1)), torch.tensor(1.0))


def lbc(gate_KT: Tensor, sample_T: Tensor, types: list[int], delta: float) -> float:
    """LoRAMoE eq. 6-8 spelled out for one head."""
    K = len(gate_KT)
    Z = []
    for n in range(K):
        for m, kind in enumerate(types):
            if kind == NO_TYPE:
                continue
            Q = sum(float(gate_KT[n, j]) for j in range(gate_KT.shape[1]) if sample_T[j] == m)
            expert_type = 0 if n < K // 2 else 1
            Z.append((1 + delta if expert_type == kind else 1 - delta) * Q)
    mean = sum(Z) / len(Z)
    return sum((z - mean) ** 2 for z in Z) / len(Z) / mean


@pytest.mark.parametrize("types", [[0, 1, 1, 0], [0, NO_TYPE, 1, NO_TYPE], [1, NO_TYPE, NO_TYPE, NO_TYPE]])
@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
def test_localized_balance_equals_the_equations(types: list[int], delta: float) -> None:
    """Sums of gates per sample, weighted by the match of types; untyped samples do not count."""
    gate_HKT = numbers(2, 6, sum(LENGTHS)).softmax(1)
    found = localized_balance(gate_HKT, samples(), torch.tensor(types), delta=delta)
    expected = sum(lbc(gate_KT, samples(), types, delta) for gate_KT in gate_HKT) / len(gate_HKT)
    torch.testing.assert_close(found.item(), expected)


def test_a_sample_without_type_gets_no_gradient() -> None:
    """The loss does not depend on its gates."""
    gate_HKT = numbers(1, 6, sum(LENGTHS)).softmax(1).requires_grad_()
    loss = localized_balance(gate_HKT, samples(), torch.tensor([0, NO_TYPE, 1, 0]))
    (found,) = torch.autograd.grad(loss, gate_HKT)
    untyped = samples() == 1
    assert (found[..., untyped] == 0).all()
    assert (found[..., ~untyped] != 0).all()


def test_no_type_at_all_is_no_loss() -> None:
    """The loss of untyped records is 0, as with beta = 0."""
    loss = localized_balance(numbers(1, 6, sum(LENGTHS)).softmax(1), samples(), torch.full((4,), NO_TYPE))
    assert loss == 0


@pytest.mark.parametrize(("delta", "own", "other"), [(0.5, 0.125, 0.375), (-0.5, 0.375, 0.125)])
def test_the_minimum_gives_a_type_to_the_other_half_and_with_negative_delta_to_its_own(
    delta: float, own: float, other: float
) -> None:
    """Uniform Z is the minimum, so gates go as 1 / I: the printed sign does the opposite of what the paper intends."""
    logits_KM = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    sample_T, types = torch.arange(2).repeat_interleave(8), torch.tensor([0, 1])
    optimizer = torch.optim.SGD([logits_KM], lr=1.0)
    for _ in range(500):
        optimizer.zero_grad()
        gate_KT = logits_KM.softmax(0).repeat_interleave(8, 1)
        torch.autograd.backward(localized_balance(gate_KT[None], sample_T, types, delta=delta))
        optimizer.step()
    expected_KM = torch.tensor([[own, other], [own, other], [other, own], [other, own]], dtype=torch.float64)
    torch.testing.assert_close(logits_KM.detach().softmax(0), expected_KM, atol=1e-3, rtol=0)


def test_typed_samples_without_tokens_are_balanced() -> None:
    """As records without images in the vision tower: the loss and its gradient are 0, not 0 / 0."""
    gate_HKT = torch.rand(2, 4, 3, requires_grad=True)
    loss = localized_balance(gate_HKT, torch.tensor([1, 1, 1]), torch.tensor([0, NO_TYPE]))
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert gate_HKT.grad is not None
    assert torch.equal(gate_HKT.grad, torch.zeros_like(gate_HKT))
