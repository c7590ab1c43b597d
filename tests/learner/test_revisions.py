"""An adapter has another revision after each change of its weights or moments: snapshots link what is unchanged."""

import pytest
import torch
from torch import Tensor

from streamlearn.adapters.presets import regime_adapter
from streamlearn.learner.learner import Learner
from tests.doubles import random_examples
from tests.learners import REGIMES, MakeLearner, restore, snapshot


@pytest.fixture
def learner(make_learner: MakeLearner) -> Learner:
    return make_learner(preset="streamlearn")


def content(learner: Learner, adapter: str) -> list[Tensor]:
    """Copies of an adapter's weights and moments."""
    weights = [p for bank in learner.banks if bank.adapter == adapter for p in (bank.A, bank.B)]
    return [tensor.detach().clone() for tensor in (*weights, *learner.moments(adapter).values())]


def changed_by(learner: Learner, act: object) -> tuple[set[str], set[str]]:
    """The adapters whose content and whose revision `act` changed; one that is new has both."""
    assert callable(act)
    before = {name: (content(learner, name), revision) for name, revision in learner.revisions.items()}
    act()
    in_content, in_revision = set(), set()
    for name, revision in learner.revisions.items():
        old, old_revision = before.get(name, ([], -1))
        new = content(learner, name)
        if len(old) != len(new) or not all(map(torch.equal, old, new)):
            in_content.add(name)
        if revision != old_revision:
            in_revision.add(name)
    return in_content, in_revision


def names(*slots: int) -> set[str]:
    return {regime_adapter(slot) for slot in slots}


@pytest.mark.parametrize("slots", [[1, 1], [0, 2], [2, 1], [-1, 1]])
def test_a_step_changes_the_adapters_of_its_regimes(learner: Learner, slots: list[int]) -> None:
    """Weights, moments and revisions of these, and of no other."""
    examples = random_examples([9, 12], prompt_length=2)
    expected = names(*(slot for slot in slots if slot >= 0))
    assert changed_by(learner, lambda: learner.step(examples, slots)) == (expected, expected)


def test_a_step_needs_the_adapters_of_its_regimes(learner: Learner) -> None:
    """A record of a regime that was never entered would be trained on in silence, and change nothing."""
    examples = random_examples([9, 12], prompt_length=2)

    def step() -> None:
        with pytest.raises(RuntimeError, match=f"no adapter \\['regime{REGIMES}'\\]"):
            learner.step(examples, [1, REGIMES])

    assert changed_by(learner, step) == (set(), set())


def test_a_refused_step_changes_nothing(learner: Learner) -> None:
    first = next(bank for bank in learner.banks if bank.adapter == regime_adapter(1))
    first.B.register_hook(lambda gradient: gradient + torch.inf)  # type: ignore[no-untyped-call]
    assert changed_by(learner, lambda: learner.step(random_examples([9], prompt_length=2), [1])) == (set(), set())


def test_a_regime_that_takes_a_slot_has_another_revision(learner: Learner) -> None:
    """Also right after a step of the one before, with no step in between."""
    learner.step(random_examples([9], prompt_length=2), [1])
    assert changed_by(learner, lambda: learner.add_regime(1, seed=7)) == (names(1), names(1))
    assert changed_by(learner, lambda: learner.add_regime(REGIMES, seed=7, start=0)) == (names(REGIMES), names(REGIMES))


def test_a_restored_state_has_another_revision(learner: Learner) -> None:
    """A rollback: what was saved in between is of the future."""
    state = snapshot(learner)
    learner.step(random_examples([9], prompt_length=2), [1])
    in_content, in_revision = changed_by(learner, lambda: restore(learner, state))
    assert in_content == names(1)
    assert in_revision == names(*range(REGIMES))


def test_no_revision_is_used_twice(learner: Learner) -> None:
    """In whatever order things happen."""
    seen = set(learner.revisions.items())
    state = snapshot(learner)
    for act in (
        lambda: learner.step(random_examples([9], prompt_length=2), [1]),
        lambda: learner.add_regime(1, seed=7),
        lambda: restore(learner, state),
        lambda: learner.step(random_examples([9], prompt_length=2), [1]),
    ):
        before = learner.revisions.copy()
        act()
        new = {(name, revision) for name, revision in learner.revisions.items() if before.get(name) != revision}
        assert new
        assert not new & seen
        seen |= new
