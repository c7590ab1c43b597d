"""Importance along a path: against its equations, and under gradient noise."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from streamlearn.baselines.importance import PathIntegral, SignalIntegral
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.settings import LearnerSettings

# Shape suffixes: H heads, K experts a head, R rank, S slice, O out features, D parameters of a quadratic, P points.
XI = 1e-3
SHAPES = {"A": (2, 3, 4, 5), "B": (2, 3, 4, 7), "router": (2, 3, 5)}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def path(steps: int = 6) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Values and gradients of a random walk, one pair per step."""
    return [
        (
            {name: numbers(*shape, seed=10 * s + i) for i, (name, shape) in enumerate(SHAPES.items())},
            {name: numbers(*shape, seed=1000 + 10 * s + i) for i, (name, shape) in enumerate(SHAPES.items())},
        )
        for s in range(steps)
    ]


def walk(steps: Sequence[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> tuple[PathIntegral, dict[str, Tensor]]:
    parameters = {name: value.clone() for name, value in steps[0][0].items()}
    integral = PathIntegral(parameters)
    for (_, gradients), (values, _) in pairwise(steps):
        integral.before()
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
        integral.after(list(gradients.values()))
    return integral, parameters


def test_equals_the_sums_of_the_equations() -> None:
    """CP-MoE eq. 6 and 7 element by element, clamped at 0."""
    steps = path()
    result = walk(steps)[0].importance(XI)
    clamped = 0
    for name in SHAPES:
        values = [step[0][name].flatten() for step in steps]
        gradients = [step[1][name].flatten() for step in steps]
        for k in range(values[0].numel()):
            omega = sum(-gradients[s][k] * (values[s + 1][k] - values[s][k]) for s in range(len(steps) - 1))
            expected = omega / ((values[-1][k] - values[0][k]) ** 2 + XI)
            torch.testing.assert_close(result[name].flatten()[k], torch.as_tensor(expected).clamp_min(0.0))
            clamped += bool(omega < 0)
    assert clamped  # some omega are negative


def test_a_parameter_without_gradient_is_not_important() -> None:
    """A change that no gradient caused adds nothing."""
    parameters = {"a": torch.zeros(3), "b": torch.zeros(3)}
    integral = PathIntegral(parameters)
    integral.before()
    for parameter in parameters.values():
        parameter.sub_(1.0)
    integral.after([torch.ones(3), None])
    integral.before()
    integral.after([None, None])
    result = integral.importance(XI)
    torch.testing.assert_close(result["a"], torch.full((3,), 1 / (1 + XI)))
    assert torch.equal(result["b"], torch.zeros(3))


def quadratic(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """A gradient and a positive semi-definite Hessian with a flat direction."""
    half_DP = numbers(size, size - 1, seed=seed)
    return numbers(size, seed=seed + 1), half_DP @ half_DP.T


def descend(g_D: Tensor, H_DD: Tensor, eta: float, steps: int) -> tuple[Tensor, PathIntegral]:
    """CP-MoE eq. 5 on a quadratic loss, from 0."""
    phi_D = torch.zeros_like(g_D)
    integral = PathIntegral({"phi": phi_D})
    for _ in range(steps):
        gradient_D = g_D + H_DD @ phi_D
        integral.before()
        phi_D.sub_(eta * gradient_D)
        integral.after([gradient_D])
    return phi_D, integral


def geometric(ratio_D: Tensor, steps: int) -> Tensor:
    """1 + ratio + ... + ratio^(steps - 1), also for ratio 1."""
    flat_D = (1 - ratio_D).abs() < 1e-9
    return torch.where(flat_D, float(steps), (1 - ratio_D**steps) / torch.where(flat_D, 1.0, 1 - ratio_D))


quadratics: Callable[..., Callable[..., None]] = given(
    seed=st.integers(0, 10_000), steps=st.integers(1, 40), step_size=st.floats(0.05, 1.95)
)


@quadratics
def test_on_a_quadratic_the_path_integral_has_a_closed_form(seed: int, steps: int, step_size: float) -> None:
    """Under gradient descent omega_k = eta sum_s [(I - eta H)^s g]_k^2; the sum over k is a geometric series."""
    g_D, H_DD = quadratic(seed)
    lambda_D, U_DD = torch.linalg.eigh(H_DD)
    eta = step_size / lambda_D.max().item()
    _, integral = descend(g_D, H_DD, eta, steps)
    omega_D = integral.state()["phi.omega"]
    expected_D = torch.zeros_like(g_D)
    for s in range(steps):
        expected_D += eta * (U_DD @ ((1 - eta * lambda_D) ** s * (U_DD.T @ g_D))) ** 2
    torch.testing.assert_close(omega_D, expected_D, rtol=1e-8, atol=1e-10)
    total = (eta * (U_DD.T @ g_D) ** 2 * geometric((1 - eta * lambda_D) ** 2, steps)).sum()
    torch.testing.assert_close(omega_D.sum(), total, rtol=1e-8, atol=1e-10)


# Shape suffixes: HEADS heads, EXPERTS experts a head, RANK rank, SLICE slice.
HEADS, EXPERTS, RANK, SLICE = 1, 2, 4, 250
LR, XI, NOISE = 1e-3, 1e-3, 0.03


class Trained(NamedTuple):
    """Means over the weights."""

    published: float
    """Mean importance by CP-MoE's eq. 6 and 7."""
    signal: float
    """Mean importance without noise."""
    published_decrease: float
    """Mean decrease of the loss per weight, as each of the two path integrals has it."""
    signal_decrease: float
    decrease: float
    """The true one."""


def train_with_noise(steps: int, *, curvature: float = 0.0, distance: float = 0.0, seed: int = 0) -> Trained:
    """AdamW on (curvature / 2) (theta - distance)^2 per weight from 0, its gradient with Gaussian noise."""
    weights = Parameter(torch.zeros(HEADS, EXPERTS, RANK, SLICE))
    optimizer = MaskedAdamW([Group("bank", {"A": weights}, None)], LearnerSettings(lr=LR))
    published, signal = PathIntegral({"A": weights}), SignalIntegral({"A": weights})
    noise = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        slope = curvature * (weights.detach() - distance)
        weights.grad = slope + NOISE * torch.randn(weights.shape, generator=noise)
        for path in (published, signal):
            path.before()
        optimizer.step(LR)
        for path in (published, signal):
            path.after([weights.grad])
    result = signal.importance(XI)["A"]
    energy = weights.detach().square().mean(2, keepdim=True) + XI
    return Trained(
        float(published.importance(XI)["A"].mean()),
        float(result.mean()),
        float(published.state()["A.omega"].mean()),
        float((result * energy).mean()),
        curvature / 2 * (distance**2 - float((weights.detach() - distance).square().mean())),
    )


def test_pure_noise_is_not_important_however_long_it_lasts() -> None:
    """The published sum grows with the steps; what is left without noise stays below a hundredth."""
    curve = {steps: train_with_noise(steps) for steps in (60, 600, 6000)}
    published = [each.published for each in curve.values()]
    assert published == pytest.approx([0.23, 1.3, 7.0], rel=0.1)
    assert all(each.signal < 0.012 for each in curve.values())
    assert curve[6000].signal < 0.002 * curve[6000].published


@pytest.mark.parametrize("steps", [60, 600, 6000])
def test_a_planted_signal_is_recovered(steps: int) -> None:
    """The decrease of the loss to 5 %; the minimum is reached after some 200 steps, and the others are noise."""
    result = train_with_noise(steps, curvature=1.0, distance=0.2)
    assert result.signal_decrease == pytest.approx(result.decrease, rel=0.05)
    assert steps < 6000 or result.published_decrease > 1.8 * result.decrease


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients_of(step: int) -> Tensor:
    """Random, with a common part; expert 1 gets no token in odd steps."""
    gradient = drawn(HEADS, EXPERTS, RANK, 3, seed=100 + step) + 1.0
    if step % 2:
        gradient[:, 1] = 0.0
    return gradient


def update(weights: Tensor, step: int) -> None:
    """Move routed experts against the common part."""
    routed = torch.tensor([1.0, 0.0 if step % 2 else 1.0]).view(1, EXPERTS, 1, 1)
    weights.sub_(routed * (drawn(*weights.shape, seed=step) + 1.0))


def walk_on(integral: SignalIntegral, weights: Tensor, steps: range, scale: float = 1.0) -> SignalIntegral:
    for step in steps:
        integral.before()
        update(weights, step)
        integral.after([gradients_of(step)], scale=scale)
    return integral


def test_equals_a_loop_over_its_equations() -> None:
    """Each displacement with the expert's own next gradient, also when steps without a token lie between them."""
    scale, steps, weights = 1.5, range(9), torch.zeros(HEADS, EXPERTS, RANK, 3, dtype=torch.float64)
    result = walk_on(SignalIntegral({"A": weights}), weights, steps, scale).importance(XI)["A"]
    assert result.shape == (HEADS, EXPERTS, 1, 3)
    positive = 0
    for k in range(EXPERTS):
        at = torch.zeros(HEADS, EXPERTS, RANK, 3, dtype=torch.float64)
        moves = []
        for step in steps:
            before = at.clone()
            update(at, step)
            if k == 0 or step % 2 == 0:
                moves.append((at - before, gradients_of(step)))
        for s in range(3):
            terms = [
                sum(float(-scale * g[0, k, r, s] * d[0, k, r, s]) for r in range(RANK)) / RANK
                for (d, _), (_, g) in pairwise(moves)
            ]
            omega, square = sum(terms), sum(term**2 for term in terms)
            signal = max(0.0, omega - square / omega) if omega > 0 else 0.0
            energy = sum(float(at[0, k, r, s]) ** 2 for r in range(RANK)) / RANK
            assert float(result[0, k, 0, s]) == pytest.approx(signal / (energy + XI))
            positive += signal > 0
    assert positive >= 4


def test_a_rotation_of_the_rank_changes_nothing() -> None:
    """The same function trained in other coordinates has the same importance."""
    Q_RR, _ = torch.linalg.qr(drawn(RANK, RANK, seed=5))
    result = []
    for turn in (torch.eye(RANK, dtype=torch.float64), Q_RR):
        weights = torch.zeros(HEADS, EXPERTS, RANK, 3, dtype=torch.float64)
        plain, integral = weights.clone(), SignalIntegral({"A": weights})
        for step in range(6):
            integral.before()
            update(plain, step)
            weights.copy_(turn @ plain)
            integral.after([turn @ gradients_of(step)])
        result.append(integral.importance(XI)["A"])
    assert result[0].any()
    torch.testing.assert_close(result[1], result[0])


def test_a_restart_drops_the_last_displacement() -> None:
    """It is not paired with a gradient of the next regime."""
    weights = torch.zeros(HEADS, EXPERTS, RANK, 3, dtype=torch.float64)
    integral = walk_on(SignalIntegral({"A": weights}), weights, range(4))
    integral.restart()
    integral.before()
    integral.after([torch.full_like(weights, -9.0)])
    assert not integral.importance(XI)["A"].any()


def test_a_signal_resumes_bit_for_bit() -> None:
    """A snapshot between two updates keeps the displacement that waits for its gradient."""
    weights = torch.zeros(HEADS, EXPERTS, RANK, 3, dtype=torch.float64)
    whole = walk_on(SignalIntegral({"A": weights}), weights, range(8))
    other = torch.zeros_like(weights)
    first = walk_on(SignalIntegral({"A": other}), other, range(3))
    second = SignalIntegral({"A": other})
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    walk_on(second, other, range(3, 8))
    assert torch.equal(second.importance(XI)["A"], whole.importance(XI)["A"])
