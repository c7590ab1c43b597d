"""Importance under gradient noise: what is left of it, and of a signal below it."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.learner.importance import PathIntegral, SignalIntegral
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.settings import LearnerSettings

# Shape suffixes: H heads, K experts a head, R rank, S slice.
H, K, R, S = 1, 2, 4, 250
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


def train(steps: int, *, curvature: float = 0.0, distance: float = 0.0, seed: int = 0) -> Trained:
    """AdamW on (curvature / 2) (theta - distance)^2 per weight from 0, its gradient with Gaussian noise."""
    weights = Parameter(torch.zeros(H, K, R, S))
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
    found = signal.importance(XI)["A"]
    energy = weights.detach().square().mean(2, keepdim=True) + XI
    return Trained(
        float(published.importance(XI)["A"].mean()),
        float(found.mean()),
        float(published.state_dict()["A.omega"].mean()),
        float((found * energy).mean()),
        curvature / 2 * (distance**2 - float((weights.detach() - distance).square().mean())),
    )


def test_pure_noise_is_not_important_however_long_it_lasts() -> None:
    """The published sum grows with the steps; what is left without noise stays below a hundredth."""
    curve = {steps: train(steps) for steps in (60, 600, 6000)}
    published = [each.published for each in curve.values()]
    assert published == pytest.approx([0.23, 1.3, 7.0], rel=0.1)
    assert all(each.signal < 0.012 for each in curve.values())
    assert curve[6000].signal < 0.002 * curve[6000].published


def test_noise_around_a_minimum_is_not_important_however_long_it_lasts() -> None:
    """Where a curved loss stops the random walk, the published sum is not even divided by a growing distance."""
    curve = {steps: train(steps, curvature=1.0) for steps in (60, 600, 6000)}
    assert curve[6000].published > 50 * curve[60].published > 10
    assert all(each.signal < 0.012 for each in curve.values())


@pytest.mark.parametrize("steps", [60, 600, 6000])
def test_a_planted_signal_is_recovered(steps: int) -> None:
    """The decrease of the loss to 5 %; the minimum is reached after some 200 steps, and the others are noise."""
    found = train(steps, curvature=1.0, distance=0.2)
    assert found.signal_decrease == pytest.approx(found.decrease, rel=0.05)
    assert steps < 6000 or found.published_decrease > 1.8 * found.decrease


@pytest.mark.parametrize(("steps", "tolerance"), [(600, 0.1), (6000, 0.25)])
def test_a_signal_of_the_size_of_the_noise_is_recovered(steps: int, tolerance: float) -> None:
    """Less exactly the longer the noise goes on; the published sum has more than ten times the decrease then."""
    found = train(steps, curvature=1.0, distance=0.05)
    assert found.signal_decrease == pytest.approx(found.decrease, rel=tolerance)
    assert steps < 6000 or found.published_decrease > 10 * found.decrease


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients_of(step: int) -> Tensor:
    """Random, with a common part; expert 1 gets no token in odd steps."""
    gradient = numbers(H, K, R, 3, seed=100 + step) + 1.0
    if step % 2:
        gradient[:, 1] = 0.0
    return gradient


def update(weights: Tensor, step: int) -> None:
    """Move routed experts against the common part."""
    routed = torch.tensor([1.0, 0.0 if step % 2 else 1.0]).view(1, K, 1, 1)
    weights.sub_(routed * (numbers(*weights.shape, seed=step) + 1.0))


def walk(integral: SignalIntegral, weights: Tensor, steps: range, scale: float = 1.0) -> SignalIntegral:
    for step in steps:
        integral.before()
        update(weights, step)
        integral.after([gradients_of(step)], scale=scale)
    return integral


def test_equals_a_loop_over_its_equations() -> None:
    """Each displacement with the expert's own next gradient, also when steps without a token lie between them."""
    scale, steps, weights = 1.5, range(9), torch.zeros(H, K, R, 3, dtype=torch.float64)
    found = walk(SignalIntegral({"A": weights}), weights, steps, scale).importance(XI)["A"]
    assert found.shape == (H, K, 1, 3)
    positive = 0
    for k in range(K):
        at = torch.zeros(H, K, R, 3, dtype=torch.float64)
        moves = []
        for step in steps:
            before = at.clone()
            update(at, step)
            if k == 0 or step % 2 == 0:
                moves.append((at - before, gradients_of(step)))
        for s in range(3):
            terms = [
                sum(float(-scale * g[0, k, r, s] * d[0, k, r, s]) for r in range(R)) / R
                for (d, _), (_, g) in pairwise(moves)
            ]
            omega, square = sum(terms), sum(term**2 for term in terms)
            signal = max(0.0, omega - square / omega) if omega > 0 else 0.0
            energy = sum(float(at[0, k, r, s]) ** 2 for r in range(R)) / R
            assert float(found[0, k, 0, s]) == pytest.approx(signal / (energy + XI))
            positive += signal > 0
    assert positive >= 4


def test_a_rotation_of_the_rank_changes_nothing() -> None:
    """The same function trained in other coordinates has the same importance."""
    Q_RR, _ = torch.linalg.qr(numbers(R, R, seed=5))
    found = []
    for turn in (torch.eye(R, dtype=torch.float64), Q_RR):
        weights = torch.zeros(H, K, R, 3, dtype=torch.float64)
        plain, integral = weights.clone(), SignalIntegral({"A": weights})
        for step in range(6):
            integral.before()
            update(plain, step)
            weights.copy_(turn @ plain)
            integral.after([turn @ gradients_of(step)])
        found.append(integral.importance(XI)["A"])
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0])


def test_a_restart_drops_the_last_displacement() -> None:
    """It is not paired with a gradient of the next regime."""
    weights = torch.zeros(H, K, R, 3, dtype=torch.float64)
    integral = walk(SignalIntegral({"A": weights}), weights, range(4))
    integral.restart()
    integral.before()
    integral.after([torch.full_like(weights, -9.0)])
    assert not integral.importance(XI)["A"].any()


def test_the_state_resumes_bit_for_bit() -> None:
    """A snapshot between two updates keeps the displacement that waits for its gradient."""
    weights = torch.zeros(H, K, R, 3, dtype=torch.float64)
    whole = walk(SignalIntegral({"A": weights}), weights, range(8))
    other = torch.zeros_like(weights)
    first = walk(SignalIntegral({"A": other}), other, range(3))
    second = SignalIntegral({"A": other})
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    walk(second, other, range(3, 8))
    assert torch.equal(second.importance(XI)["A"], whole.importance(XI)["A"])


def test_a_parameter_without_a_gradient_is_not_important() -> None:
    """None instead of a gradient ends no pairing and adds nothing."""
    weights = torch.zeros(H, K, R, 3, dtype=torch.float64)
    integral = SignalIntegral({"A": weights})
    integral.before()
    weights.sub_(1.0)
    integral.after([None])
    assert not integral.importance(XI)["A"].any()
