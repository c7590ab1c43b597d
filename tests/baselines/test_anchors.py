"""Anchors, and how the importance of several regimes adds up to what they hold."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.adapters.tuner import banks
from streamlearn.baselines.importance import Anchors, RegimeImportance, SummedImportance
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.settings import LearnerSettings
from tests.learners import MakeLearner, make_learner, tiny

__all__ = ["make_learner", "tiny"]  # fixtures


H, K, R, S, O = 2, 3, 4, 5, 6  # noqa: E741
STRENGTH = 0.7


def group(seed: int = 0) -> Group:
    draw = torch.Generator().manual_seed(seed)
    parameters = {
        "A": Parameter(torch.randn(H, K, R, S, generator=draw)),
        "B": Parameter(torch.randn(H, K, R, O, generator=draw)),
    }
    return Group("bank", parameters, torch.ones(H, K, dtype=torch.long))


def importance(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"bank.A": torch.rand(H, K, R, S, generator=draw), "bank.B": torch.rand(H, K, R, O, generator=draw)}


def moved(made: Group, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=draw))


def loop_over_eq_14(made: Group, omega: dict[str, Tensor], old: dict[str, Tensor]) -> float:
    """L_reg as a loop over experts and elements."""
    total = 0.0
    for name, parameter in made.parameters.items():
        for h in range(H):
            for i in range(K):
                for r in range(R):
                    for s in range(parameter.shape[-1]):
                        drift = float(parameter.detach()[h, i, r, s] - old[name][h, i, r, s])
                        total += float(omega[f"bank.{name}"][h, i, r, s]) * drift**2
    return total


def hold(anchors: Anchors, omega: dict[str, Tensor]) -> None:
    """Write importance, as `consolidate` does, and hold it at the current weights."""
    for name, held in anchors.importance.items():
        held.copy_(omega[name])
    anchors.move()
    anchors.hold()


def penalty(made: Group) -> float:
    """Lambda L_reg of what the optimizer holds."""
    terms = [
        hold.strength * (hold.importance * (made.parameters[name].detach() - hold.anchor).square()).sum()
        for name, hold in made.holds.items()
    ]
    return float(sum(terms))


def test_the_penalty_is_eq_14() -> None:
    """The anchors are the weights when they were last moved, and 0 is the penalty there."""
    made = group()
    anchors = Anchors([made], STRENGTH, over_rank=False)
    hold(anchors, importance(1))
    moved(made, 2)
    anchors.move()
    old = {name: parameter.detach().clone() for name, parameter in made.parameters.items()}
    assert penalty(made) == 0.0
    moved(made, 4)
    assert penalty(made) == pytest.approx(STRENGTH * loop_over_eq_14(made, importance(1), old), rel=1e-5)


def test_the_optimizer_adds_the_penaltys_own_gradient() -> None:
    """A step equals one with autograd's gradient of task plus lambda L_reg; `grad` is the gradient of the task only."""
    settings = LearnerSettings(lr=1e-2)
    anchored, plain = group(), group()
    anchors = Anchors([anchored], STRENGTH, over_rank=False)
    hold(anchors, importance(1))
    for made in (anchored, plain):
        moved(made, 2)
    old = group()
    task = [torch.randn_like(p) for p in anchored.parameters.values()]
    for made in (anchored, plain):
        for parameter, gradient in zip(made.parameters.values(), task, strict=True):
            parameter.grad = gradient.clone()
    terms = [
        (importance(1)[f"bank.{name}"] * (p - old.parameters[name].detach()).square()).sum()
        for name, p in plain.parameters.items()
    ]
    (STRENGTH * sum(terms)).backward()  # type: ignore[union-attr]
    MaskedAdamW([anchored], settings).step(1e-2)
    MaskedAdamW([plain], settings).step(1e-2)
    for name in anchored.parameters:
        torch.testing.assert_close(anchored.parameters[name], plain.parameters[name])
    for parameter, gradient in zip(anchored.parameters.values(), task, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


DAMPING = 1e-3
SHAPES = {"bank.A": (H, K, 1, S), "bank.B": (H, K, 1, O)}


def store_of_regimes() -> tuple[RegimeImportance, dict[str, Tensor]]:
    held = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return RegimeImportance(held, {"bank": R}, DAMPING), held


def averaged(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=draw) for name, shape in SHAPES.items()}


def test_a_regime_is_held_by_the_others_only() -> None:
    """In whatever order they came; one that was never entered is held by all."""
    store, held = store_of_regimes()
    for slot in (2, 0, 1):
        store.add(slot, averaged(slot))
    for slot in (0, 1, 2, 3):
        store.enter(slot)
        for name, value in held.items():
            expected = torch.stack([averaged(other)[name] for other in range(3) if other != slot]).sum(0)
            torch.testing.assert_close(value, expected)


def test_a_return_takes_nothing_away_and_adds_only_what_is_more() -> None:
    """One with nothing left to learn, fifty that learn the same again, and one that learns something else."""
    store, held = store_of_regimes()
    store.add(0, averaged(1))
    store.add(0, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    for _ in range(50):
        store.add(0, averaged(1))
    store.enter(1)
    assert all(torch.equal(held[name], averaged(1)[name]) for name in SHAPES)
    store.add(0, averaged(2))
    store.enter(1)
    assert all(torch.equal(held[name], torch.maximum(averaged(1)[name], averaged(2)[name])) for name in SHAPES)


@pytest.mark.parametrize("returns", [1, 20])
def test_what_a_regime_contributes_is_bounded(returns: int) -> None:
    """Whatever was measured: a shift of every weight by sqrt(xi) costs 1 nat at most, in the proportions measured."""
    store, held = store_of_regimes()
    for seed in range(returns):
        store.add(0, {name: 1e6 * omega for name, omega in averaged(seed).items()})
    store.enter(1)
    cost = sum(float((DAMPING * R * omega).sum()) for omega in held.values())
    assert cost == pytest.approx(1.0, rel=1e-5)
    if returns == 1:
        ratio = torch.cat([(held[name] / averaged(0)[name]).flatten() for name in SHAPES])
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_a_released_regime_holds_nothing() -> None:
    """At once, in the regime that is in training."""
    store, held = store_of_regimes()
    for slot in (0, 1):
        store.add(slot, averaged(slot))
    store.enter(2)
    store.release(0)
    assert all(torch.equal(held[name], averaged(1)[name]) for name in SHAPES)
    store.release(0)
    store.release(1)
    assert not any(value.any() for value in held.values())


def test_every_segment_adds_and_a_release_removes_a_fraction(make_learner: MakeLearner) -> None:
    """CP-MoE eq. 13, with and without h; what is released is the regime's fraction of each expert's sum."""
    made = tuple(banks(make_learner(preset="cp-moe").model))
    shapes = {f"{bank.name}.{part}": p.shape for bank in made for part, p in (("A", bank.A), ("B", bank.B))}
    held = {name: torch.zeros(shape) for name, shape in shapes.items()}
    store = SummedImportance(held, made, 3)

    def drawn(seed: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return {name: torch.rand(shape, generator=draw) for name, shape in shapes.items()}

    h = {bank.name: torch.rand(bank.A.shape[:2], generator=torch.Generator().manual_seed(9)) for bank in made}
    store.add(0, drawn(1))
    store.add(2, drawn(2), h)
    store.add(0, drawn(3))
    store.enter(0)  # holds its own importance too
    for bank in made:
        parts = [f"{bank.name}.{part}" for part in "AB"]
        first = [drawn(1)[name] + drawn(3)[name] for name in parts]
        second = [h[bank.name][:, :, None, None] * drawn(2)[name] for name in parts]
        for name, one, two in zip(parts, first, second, strict=True):
            torch.testing.assert_close(held[name], one + two)
        masses = [torch.stack([omega.sum((2, 3)) for omega in omegas]).sum(0) for omegas in (first, second)]
        mass_HKN = torch.stack([masses[0], torch.zeros_like(masses[1]), masses[1]], dim=2)
        torch.testing.assert_close(store.mass[bank.name], mass_HKN)
    before = {name: value.clone() for name, value in held.items()}
    kept = {bank.name: 1 - store.mass[bank.name][:, :, 0] / store.mass[bank.name].sum(2) for bank in made}
    store.release(0)
    for name, value in held.items():
        torch.testing.assert_close(value, before[name] * kept[name.rpartition(".")[0]][:, :, None, None])


# Shape suffixes: R4 rank, S4 slice, G regimes.
G, R4, OWN = 24, 2, 10
LR, NOISE, STEPS, XI = 1e-2, 0.1, 100, 1e-3
