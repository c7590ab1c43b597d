"""Closing, opening, releasing and forgetting regimes on a model."""

from typing import Any

import pytest
import torch

from streamlearn.consolidate.claims import claimed
from streamlearn.consolidate.consolidator import Consolidator
from streamlearn.learner.learner import Learner
from streamlearn.probe.probe import ProbeReport
from streamlearn.settings import ConsolidateSettings
from tests.doubles import random_examples
from tests.learners import REGIMES, MakeLearner, make_learner, tiny

__all__ = ["make_learner", "tiny"]  # fixtures


def consolidator(learner: Learner, claims: int = 1, **settings: Any) -> Consolidator:
    return Consolidator(learner, ConsolidateSettings(**settings), experts_claimed=claims, regimes=REGIMES, seed=0)


def train(learner: Learner, slot: int, seeds: range = range(4)) -> None:
    for seed in seeds:
        learner.step(random_examples([9, 8, 7], prompt_length=3, seed=10 * slot + seed), [slot] * 3)


def report(learner: Learner, similarity: float = 0.5, importance: float = 0.0) -> ProbeReport:
    return ProbeReport(
        {bank.name: torch.full(bank.A.shape[:2], similarity) for bank in learner.banks},
        {f"{b.name}.{n}": torch.full_like(p, importance) for b in learner.banks for n, p in (("A", b.A), ("B", b.B))},
        (),
        0,
        0.0,
    )


def total(learner: Learner) -> float:
    return sum(float(omega.sum()) for omega in learner.anchors.importance().values())


def test_closing_anchors_the_experts_of_the_regime(make_learner: MakeLearner) -> None:
    """Only experts of the regime gain importance; the anchors are the current weights; moving away is penalized."""
    learner = make_learner(preset="streamlearn")
    made = consolidator(learner)
    made.open(0, 1, None)
    train(learner, 0)
    made.close(0)
    for bank in learner.banks:
        assert bank.bias_HKN is not None
        used_HK = claimed(bank.bias_HKN)[:, :, 0]
        omega = learner.anchors.importance()[f"{bank.name}.B"].flatten(2).any(2)
        assert torch.equal(omega, used_HK)
        assert torch.equal(made.mass[bank.name][:, :, 0] > 0, used_HK)
    assert learner.anchors.penalty() == 0.0
    made.open(1, 2, None)
    for bank in learner.banks:  # another regime on the same experts
        assert bank.bias_HKN is not None
        bank.bias_HKN[:, :, 1] = bank.bias_HKN[:, :, 0]
    train(learner, 1)
    assert learner.anchors.penalty() > 0.0


def test_a_strong_anchor_keeps_shared_experts_closer(make_learner: MakeLearner) -> None:
    """With a larger lambda, the same second regime changes important weights of shared experts less."""
    distances = []
    for strength in (1e-6, 1e3):
        learner = make_learner(preset="streamlearn", changes={"anchor_strength": strength})
        made = consolidator(learner)
        made.open(0, 1, None)
        train(learner, 0)
        made.close(0)
        omega = {name: value.clone() for name, value in learner.anchors.importance().items()}
        old = {b.name: b.B.detach().clone() for b in learner.banks}
        train(learner, 0, range(50, 56))
        moved = [(omega[f"{b.name}.B"] * (b.B.detach() - old[b.name]).square()).sum() for b in learner.banks]
        distances.append(float(sum(moved)))
    assert distances[1] < distances[0] / 2


def test_a_soft_bias_is_alpha_times_cka(make_learner: MakeLearner) -> None:
    """CP-MoE eq. 10."""
    learner = make_learner(preset="cp-moe")
    consolidator(learner).open(2, 3, report(learner, similarity=0.5))
    for bank in learner.banks:
        assert bank.bias_HKN is not None
        torch.testing.assert_close(bank.bias_HKN[:, :, 2], torch.full(bank.A.shape[:2], 0.1))
        assert not bank.bias_HKN[:, :, [0, 1, 3]].any()


def test_transient_importance_is_added_when_the_regime_ends_weighted_by_cka(make_learner: MakeLearner) -> None:
    """CP-MoE eq. 13: Omega += h Omega_t, after training on the task."""
    learner = make_learner(preset="cp-moe")
    learner.path = None  # as with importance: transient
    made = consolidator(learner, importance="transient")
    made.open(0, 1, report(learner, similarity=0.25, importance=2.0))
    assert total(learner) == 0.0
    made.close(0)
    for omega in learner.anchors.importance().values():
        torch.testing.assert_close(omega, torch.full_like(omega, 0.5))
    made.close(0)  # no probe since
    assert all((omega == 0.5).all() for omega in learner.anchors.importance().values())


def test_releasing_a_regime_removes_its_importance_only(make_learner: MakeLearner) -> None:
    """Two regimes without shared experts: releasing one removes its importance and keeps that of the other."""
    learner = make_learner(preset="streamlearn")
    made = consolidator(learner)
    made.open(0, 1, None)
    train(learner, 0)
    made.close(0)
    made.open(1, 2, None)
    train(learner, 1)
    made.close(1)
    before = {name: omega.clone() for name, omega in learner.anchors.importance().items()}
    made.release(0)
    for bank in learner.banks:
        assert bank.bias_HKN is not None
        first, second = (claimed(bank.bias_HKN)[:, :, slot] for slot in (0, 1))
        omega = learner.anchors.importance()[f"{bank.name}.B"]
        assert not omega[first].any()
        assert torch.equal(omega[second], before[f"{bank.name}.B"][second])
        assert before[f"{bank.name}.B"][first].any()


def test_a_forgotten_regime_frees_its_experts(make_learner: MakeLearner) -> None:
    """A reused slot claims again, and the claims of its former regime are gone."""
    learner = make_learner(preset="streamlearn")
    made = consolidator(learner)
    for slot in range(REGIMES):
        made.open(slot, slot + 1, None)
    (bank, *_) = learner.banks
    assert bank.bias_HKN is not None
    assert (claimed(bank.bias_HKN).sum(2) == 1).all()  # four regimes, four experts per head
    freed = claimed(bank.bias_HKN)[:, :, 2].clone()
    made.open(2, 9, None)
    assert torch.equal(claimed(bank.bias_HKN)[:, :, 2], freed)  # the only unclaimed experts


def test_several_claims_leave_the_choice_to_tokens(make_learner: MakeLearner) -> None:
    """With two claims per head, one batch uses both experts and no others."""
    learner = make_learner(preset="streamlearn")
    consolidator(learner, claims=2).open(0, 1, None)
    learner.step(random_examples([60, 50], prompt_length=3), [0, 0])
    for bank in learner.banks:
        assert bank.bias_HKN is not None
        assert bank.load_HK is not None
        used, allowed = bank.load_HK > 0, claimed(bank.bias_HKN)[:, :, 0]
        assert not (used & ~allowed).any()
        assert (used.sum(1) == 2).any()


@pytest.mark.parametrize("importance", ["path", "transient"])
def test_it_goes_on_from_a_saved_state(make_learner: MakeLearner, importance: str) -> None:
    """Masses, similarities and pending importance are restored."""
    one, two = make_learner(preset="streamlearn"), make_learner(preset="streamlearn")
    first, second = (consolidator(learner, importance=importance) for learner in (one, two))
    first.open(0, 1, report(one, importance=1.0))
    train(one, 0)
    first.close(0)
    first.open(1, 2, report(one, importance=3.0))
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    assert first.state().keys() == second.state().keys()
    assert all(torch.equal(first.state()[name], second.state()[name]) for name in first.state())
