"""Closing, opening, releasing and forgetting regimes on a model."""

from typing import Any

import pytest
import torch

from streamlearn.baselines.consolidate import BaselineHooks
from streamlearn.baselines.importance import SummedImportance
from streamlearn.baselines.transient import ProbeReport, TransientExpert
from streamlearn.learner.learner import Learner
from tests.doubles import random_examples
from tests.learners import MakeLearner, hooks_of, make_learner, tiny

__all__ = ["make_learner", "tiny"]  # fixtures


PROBED = random_examples([12, 9, 14], prompt_length=4, seed=5)
PATH: dict[str, Any] = {"preset": "cp-moe", "changes": {"importance": "path"}}


def begin(learner: Learner, slot: int, report: ProbeReport | None = None) -> None:
    """Open a regime, probed or not."""
    hooks = hooks_of(learner)
    hooks._probed = report
    hooks.open(slot)


def train(learner: Learner, slot: int, seeds: range = range(4)) -> None:
    for seed in seeds:
        learner.step(random_examples([9, 8, 7], prompt_length=3, seed=10 * slot + seed), [slot] * 3)


def report(learner: Learner, similarity: float = 0.5, importance: float = 0.0, last: float = 1.0) -> ProbeReport:
    expert = TransientExpert(learner.banks, seed=7)
    for B in expert.B.values():
        torch.nn.init.normal_(B, generator=torch.Generator().manual_seed(8))
    omegas = hooks_of(learner).importance().items()
    return ProbeReport(
        expert,
        {bank.name: torch.full(bank.A.shape[:2], similarity) for bank in learner.banks},
        {name: torch.full_like(omega[:, :1], importance) for name, omega in omegas},
        (2.0, last),
        0,
    )


def penalty(learner: Learner) -> float:
    """Lambda L_reg of what the optimizer holds."""
    return sum(
        hold.strength * float((hold.importance * (group.parameters[part].detach() - hold.anchor).square()).sum())
        for group in learner.optimizer.groups
        for part, hold in group.holds.items()
    )


def total(learner: Learner) -> float:
    return sum(float(omega.sum()) for omega in hooks_of(learner).importance().values())


def test_closing_anchors_the_shared_experts(make_learner: MakeLearner) -> None:
    """Trained experts gain importance, all of it the regime's; the current weights are the anchors."""
    learner = make_learner(**PATH)
    made = hooks_of(learner)
    assert isinstance(made.store, SummedImportance)
    begin(learner, 0)
    train(learner, 0)
    made.leave(0)
    for bank in learner.banks:
        omega_A, omega_B = (hooks_of(learner).importance()[f"{bank.name}.{part}"] for part in "AB")
        assert omega_B.any()
        mass_HK = omega_A.flatten(2).sum(2) + omega_B.flatten(2).sum(2)
        torch.testing.assert_close(made.store.mass[bank.name][:, :, 0], mass_HK)
        assert not made.store.mass[bank.name][:, :, 1:].any()
    assert penalty(learner) == 0.0
    begin(learner, 1)
    train(learner, 1)
    assert penalty(learner) > 0.0


def test_a_soft_bias_is_alpha_times_cka(make_learner: MakeLearner) -> None:
    """CP-MoE eq. 10."""
    learner = make_learner(preset="cp-moe")
    begin(learner, 2, report(learner, similarity=0.5))
    for bank in learner.banks:
        assert bank.bias_HKN is not None
        torch.testing.assert_close(bank.bias_HKN[:, :, 2], torch.full(bank.A.shape[:2], 0.1))
        assert not bank.bias_HKN[:, :, [0, 1, 3]].any()


@pytest.mark.parametrize("accumulation", ["sum", "per_regime"])
def test_transient_importance_is_added_when_the_regime_ends_weighted_by_cka(
    make_learner: MakeLearner, accumulation: str
) -> None:
    """CP-MoE eq. 13, Omega += h Omega_t, for every expert; h is of the experts as the regime leaves them."""
    learner = make_learner(preset="cp-moe", changes={"accumulation": accumulation})
    made = hooks_of(learner)
    found = report(learner, similarity=0.0, importance=1e-9)
    begin(learner, 0, found)
    train(learner, 0)
    assert total(learner) == 0.0
    made.leave(0, PROBED)
    made.enter(1)
    similarity = found.expert.similarity(learner, PROBED)
    for bank in learner.banks:
        for part in "AB":
            omega = hooks_of(learner).importance()[f"{bank.name}.{part}"]
            torch.testing.assert_close(omega, (1e-9 * similarity[bank.name][:, :, None, None]).expand_as(omega))
    assert total(learner) > 0.0, "the first regime is protected"
    before = total(learner)
    made.leave(1)  # not probed
    assert total(learner) == before


def test_without_the_mask_every_expert_gets_the_same_importance(make_learner: MakeLearner) -> None:
    """Table 3 of the paper, the row without CKA: h is 1."""
    learner = make_learner(preset="cp-moe", consolidate={"similarity_mask": False})
    begin(learner, 0, report(learner, importance=2.0))
    hooks_of(learner).leave(0, PROBED)
    assert all((omega == 2.0).all() for omega in hooks_of(learner).importance().values())


def test_nothing_of_a_failed_probe_is_used(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its similarity nor its importance; the report says that it failed."""
    learner = make_learner(preset="cp-moe")
    made = hooks_of(learner)
    for last, failed in ((1.0, False), (2.0, True)):
        found = report(learner, 0.5, 1.0, last)
        monkeypatch.setattr("streamlearn.baselines.consolidate.probe", lambda *_, found=found, **__: found)
        assert made.probe(PROBED, 1).probe_failed is failed
        made.open(0)
        assert all(bool(bank.bias_HKN.any()) is not failed for bank in learner.banks if bank.bias_HKN is not None)


def test_releasing_a_regime_removes_its_share_of_the_importance(make_learner: MakeLearner) -> None:
    """Of an expert that two regimes were trained on, the other regime's share stays."""
    learner = make_learner(**PATH)
    made = hooks_of(learner)
    assert isinstance(made.store, SummedImportance)
    for slot in (0, 1):
        begin(learner, slot)
        train(learner, slot)
        made.leave(slot)
    before = {name: omega.clone() for name, omega in hooks_of(learner).importance().items()}
    mass = {name: mass_HKN.clone() for name, mass_HKN in made.store.mass.items()}
    made.release(0)
    for bank in learner.banks:
        kept_HK = 1 - mass[bank.name][:, :, 0] / mass[bank.name].sum(2).clamp_min(1e-30)
        name = f"{bank.name}.B"
        torch.testing.assert_close(hooks_of(learner).importance()[name], before[name] * kept_HK[:, :, None, None])
        assert 0 < kept_HK.min() < kept_HK.max() < 1
        assert not made.store.mass[bank.name][:, :, 0].any()


def test_what_happens_to_another_regime_leaves_the_segments_importance(make_learner: MakeLearner) -> None:
    """A split opens a regime beside the one under way; another one's answers change, or it is dropped."""
    totals = []
    for act in (
        lambda made: None,
        lambda made: made.open(2),
        lambda made: made.release(0),
        lambda made: made.drop(0),
        lambda made: made.release(1),
    ):
        learner = make_learner(**PATH)
        made = hooks_of(learner)
        for slot in (0, 1):
            begin(learner, slot)
        made.enter(1)
        train(learner, 1)
        act(made)
        made.leave(1)
        totals.append(total(learner))
    whole, *others, own = totals
    assert whole > 0
    assert others == [whole] * 3
    assert own == 0, "its targets changed: what it measured is of the old ones"


def learned(learner: Learner, made: BaselineHooks, slot: int, *, steps: int, new: bool = True) -> None:
    """A segment of one regime: the same records again and again, so that their loss falls in every step."""
    if new:
        begin(learner, slot)
    made.enter(slot)
    for _ in range(steps):
        train(learner, slot, range(1))
    made.leave(slot)


def drift(learner: Learner, before: list[torch.Tensor]) -> float:
    pairs = zip(learner.optimizer.parameters(), before, strict=True)
    return float(torch.stack([(now.detach() - then).square().sum() for now, then in pairs]).sum().sqrt())


def copies(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.optimizer.parameters()]


@pytest.mark.parametrize("accumulation", ["sum", "per_regime"])
def test_a_long_regime_that_returns_is_held_by_the_published_sum_only(
    make_learner: MakeLearner, accumulation: str
) -> None:
    """Kept apart by regime, it trains to the same bits as without anchors; the published sum freezes it."""
    moved = {}
    for strength in (0.0, 1e3):
        learner = make_learner(preset="lora", changes={"anchor_strength": strength, "accumulation": accumulation})
        made = hooks_of(learner)
        learned(learner, made, 0, steps=40)
        assert strength == 0 or accumulation == "sum" or not total(learner)  # none of it is held against itself
        learned(learner, made, 1, steps=0)
        assert strength == 0 or total(learner) > 0 or accumulation == "per_regime"
        made.enter(0)
        before = copies(learner)
        train(learner, 0, range(100, 110))
        moved[strength] = (drift(learner, before), copies(learner))
    if accumulation == "sum":
        assert moved[1e3][0] < 0.5 * moved[0.0][0]
    else:
        assert all(torch.equal(one, two) for one, two in zip(moved[1e3][1], moved[0.0][1], strict=True))


def test_another_regime_is_held_by_what_a_regime_learned(make_learner: MakeLearner) -> None:
    """Its loss on the first regime rises less than without anchors, and less the stronger they are."""
    losses = []
    for strength in (0.0, 1.0, 1e3):
        learner = make_learner(preset="lora", changes={"anchor_strength": strength})
        made = hooks_of(learner)
        learned(learner, made, 0, steps=40)
        begin(learner, 1)
        made.enter(1)
        for _ in range(20):
            train(learner, 1, range(1))
        examples = random_examples([9, 8, 7], prompt_length=3, seed=0)
        losses.append(learner.step(examples, [0] * 3).loss)
    assert losses[0] > 1.2 * losses[1] > 1.2 * losses[2]


@pytest.mark.parametrize("accumulation", ["sum", "per_regime"])
@pytest.mark.parametrize("importance", ["path", "transient"])
def test_it_goes_on_from_a_saved_state(make_learner: MakeLearner, importance: str, accumulation: str) -> None:
    """Masses, importance by regime, the transient expert and pending importance are restored."""
    one, two = (
        make_learner(preset="cp-moe", changes={"accumulation": accumulation, "importance": importance})
        for _ in range(2)
    )
    first, second = hooks_of(one), hooks_of(two)
    begin(one, 0, report(one, importance=1.0))
    train(one, 0)
    first.leave(0, PROBED)
    begin(one, 1, report(one, importance=3.0))
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    assert first.state().keys() == second.state().keys()
    assert all(torch.equal(first.state()[name], second.state()[name]) for name in first.state())
