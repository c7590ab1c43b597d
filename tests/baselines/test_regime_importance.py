"""Importance kept apart by regime, without a model."""

import pytest
import torch
from torch import Tensor

from streamlearn.baselines.importance import RegimeImportance

H, K, R, S, O = 2, 3, 4, 5, 6  # noqa: E741
DAMPING = 1e-3
SHAPES = {"bank.A": (H, K, 1, S), "bank.B": (H, K, 1, O)}


def made() -> tuple[RegimeImportance, dict[str, Tensor]]:
    held = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return RegimeImportance(held, {"bank": R}, DAMPING), held


def importance(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=draw) for name, shape in SHAPES.items()}


def copied(held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in held.items()}


def test_a_regime_is_held_by_the_others_only() -> None:
    """In whatever order they came; one that was never entered is held by all."""
    store, held = made()
    for slot in (2, 0, 1):
        store.add(slot, importance(slot))
    for slot in (0, 1, 2, 3):
        store.enter(slot)
        for name, value in held.items():
            expected = torch.stack([importance(other)[name] for other in range(3) if other != slot]).sum(0)
            torch.testing.assert_close(value, expected)


def test_a_return_takes_nothing_away_and_adds_only_what_is_more() -> None:
    """One with nothing left to learn, fifty that learn the same again, and one that learns something else."""
    store, held = made()
    store.add(0, importance(1))
    store.add(0, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    for _ in range(50):
        store.add(0, importance(1))
    store.enter(1)
    assert all(torch.equal(held[name], importance(1)[name]) for name in SHAPES)
    store.add(0, importance(2))
    store.enter(1)
    assert all(torch.equal(held[name], torch.maximum(importance(1)[name], importance(2)[name])) for name in SHAPES)


@pytest.mark.parametrize("returns", [1, 20])
def test_what_a_regime_contributes_is_bounded(returns: int) -> None:
    """Whatever was measured: a shift of every weight by sqrt(xi) costs 1 nat at most, in the proportions measured."""
    store, held = made()
    for seed in range(returns):
        store.add(0, {name: 1e6 * omega for name, omega in importance(seed).items()})
    store.enter(1)
    cost = sum(float((DAMPING * R * omega).sum()) for omega in held.values())
    assert cost == pytest.approx(1.0, rel=1e-5)
    if returns == 1:
        ratio = torch.cat([(held[name] / importance(0)[name]).flatten() for name in SHAPES])
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_the_weight_is_that_of_the_expert() -> None:
    """H of CP-MoE eq. 13."""
    store, held = made()
    h_HK = torch.rand(H, K, generator=torch.Generator().manual_seed(9))
    store.add(0, importance(1), {"bank": h_HK})
    store.enter(1)
    for name, value in held.items():
        torch.testing.assert_close(value, importance(1)[name] * h_HK[:, :, None, None])


def test_a_released_regime_holds_nothing() -> None:
    """At once, in the regime that is in training."""
    store, held = made()
    for slot in (0, 1):
        store.add(slot, importance(slot))
    store.enter(2)
    store.release(0)
    assert all(torch.equal(held[name], importance(1)[name]) for name in SHAPES)
    store.release(0)
    store.release(1)
    assert not any(value.any() for value in held.values())


def test_it_goes_on_from_a_saved_state_bit_for_bit() -> None:
    """Also into a store that has gone further, as a rollback does; the order in which regimes came does not matter."""
    store, held = made()
    for slot in (5, 0, 11):
        store.add(slot, importance(slot))
    store.enter(11)
    saved, before = {name: value.clone() for name, value in store.state().items()}, copied(held)
    other, others_held = made()
    other.add(7, importance(7))
    other.load_state({**dict(sorted(saved.items())), "consolidate.similarity.bank": torch.zeros(1)})
    other.enter(11)
    assert other.state().keys() == saved.keys()
    assert all(torch.equal(others_held[name], before[name]) for name in SHAPES)
    for each in (store, other):
        each.add(0, importance(3))
        each.enter(11)
    assert all(torch.equal(others_held[name], held[name]) for name in SHAPES)
