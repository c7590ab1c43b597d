"""What answers the unknown: the lowest of the losses that are measured on hold-out records."""

from collections.abc import Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from streamlearn.adaptation.fallback import Fallback
from streamlearn.adapters.config import regime_adapter
from streamlearn.adapters.routing_context import NO_REGIME, Slot
from streamlearn.learner.evaluation import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Example
from tests.doubles import random_examples
from tests.learner.reference import train
from tests.learners import REGIMES, MakeLearner, state_of

EXAMPLES = random_examples([9, 7, 8], prompt_length=4)


@pytest.fixture
def learner(make_learner: MakeLearner) -> Learner:
    learner = make_learner(lr=3e-2)
    train(learner, range(4))
    return learner


@pytest.fixture
def separate(make_learner: MakeLearner) -> Learner:
    """Regimes with adapters of their own, none of which equals the backbone."""
    learner = make_learner(preset="streamlearn", lr=3e-2)
    for slot in range(REGIMES):
        learner.step(random_examples([8, 5], seed=slot), [slot, slot])
    return learner


def fallback(
    learner: Learner, setting: Any = "auto", *, others: tuple[int, ...] = (1, 2), has_regimes: bool = True
) -> Fallback:
    """With the regimes in the slots 0 and `others`, of which the first is nearest to everything."""

    class Regimes:
        def assign_to_other(self, inputs: Sequence[NDArray[Any]], slot: int) -> list[int]:
            assert slot not in others
            return [others[0]] * len(inputs)

        def by_records(self) -> list[int]:
            return [*others, 0]

    return Fallback(learner, setting, Regimes(), has_regimes=has_regimes, pack_tokens=64)


def mean_loss(learner: Learner, examples: Sequence[Example], slot: Slot) -> float:
    """Each record counts alike, however many tokens it has."""
    work = score(learner.model, examples, learner.device, pack_tokens=64, slots=[slot] * len(examples))
    scores = run_to_end(work)
    return sum(each.loss_sum / each.tokens for each in scores) / len(scores)


def test_the_losses_are_those_of_the_alternatives(separate: Learner) -> None:
    """Over the records of all measured regimes; the lowest decides."""
    found = fallback(separate)
    found.measure(0, EXAMPLES)
    found.measure(3, EXAMPLES[:1])
    losses = {
        "backbone": mean_loss(separate, [*EXAMPLES, EXAMPLES[0]], NO_REGIME),
        "mean": (3 * mean_loss(separate, EXAMPLES, (1, 2)) + mean_loss(separate, EXAMPLES[:1], (1, 2, 0))) / 4,
        "nearest": mean_loss(separate, [*EXAMPLES, EXAMPLES[0]], 1),
    }
    assert len(set(losses.values())) == 3
    status = found.status
    assert status.records == 4
    assert status.losses == pytest.approx(losses, rel=1e-5)
    assert status.answered_by == found.answered_by == min(losses, key=losses.__getitem__)


def test_shared_experts_have_no_mean(learner: Learner) -> None:
    """There is one adapter, with a bias for each regime."""
    found = fallback(learner)
    found.measure(0, EXAMPLES)
    losses = {name: mean_loss(learner, EXAMPLES, slot) for name, slot in (("nearest", 1), ("backbone", NO_REGIME))}
    assert found.status.mean_loss is None
    assert found.status.nearest_loss == pytest.approx(losses["nearest"], rel=1e-5)
    assert found.status.backbone_loss == pytest.approx(losses["backbone"], rel=1e-5)
    assert found.answered_by == min(losses, key=losses.__getitem__)


@pytest.mark.parametrize(
    ("winner", "factors"), [("nearest", (1.0, 0.0)), ("mean", (8.0, -6.0)), ("backbone", (-1.0, -1.0))]
)
def test_any_may_win(separate: Learner, winner: str, factors: tuple[float, float]) -> None:
    """The nearest adapter fits; it overshoots, and another takes most of that back; both do the opposite."""
    trained = random_examples([6, 9, 12], seed=0, prompt_length=1)
    for _ in range(8):
        separate.step(trained, [0] * len(trained))
    fitting = {bank.linear: bank for bank in separate.banks if bank.adapter == regime_adapter(0)}
    for bank in separate.banks:
        for slot, factor in zip((1, 2), factors, strict=True):
            if bank.adapter == regime_adapter(slot):
                bank.A.data.copy_(fitting[bank.linear].A)
                bank.B.data.copy_(factor * fitting[bank.linear].B)
    found = fallback(separate)
    found.measure(0, trained)
    assert found.answered_by == winner


def test_without_a_measurement_the_backbone_answers(separate: Learner) -> None:
    """As while one regime is remembered, or after its losses were dropped."""
    found = fallback(separate)
    assert found.answered_by == "backbone"
    found.measure(0, EXAMPLES)
    found.forget(0)
    assert found.status == fallback(separate).status
    assert (found.status.nearest_loss, found.status.answered_by) == (None, "backbone")


@pytest.mark.parametrize(("setting", "slot"), [("mean", (1, 2, 0)), ("nearest", 1), ("backbone", NO_REGIME)])
def test_a_setting_is_obeyed_without_measuring(separate: Learner, setting: Any, slot: Slot) -> None:
    found = fallback(separate, setting)
    assert not found.is_measured
    assert found.answered_by == setting
    assert found.slot_for(1) == slot


def test_where_routing_has_no_regimes_the_adapter_answers(learner: Learner) -> None:
    """There is no other regime's loss to measure; only the setting chooses the backbone."""
    assert fallback(learner, has_regimes=False).answered_by == "nearest"
    assert not fallback(learner, has_regimes=False).is_measured
    assert fallback(learner, "backbone", has_regimes=False).answered_by == "backbone"


def test_measuring_changes_no_weight(learner: Learner) -> None:
    """Nor anything else that training depends on."""
    before = {name: tensor.clone() for name, tensor in state_of(learner).items()}
    fallback(learner).measure(0, EXAMPLES)
    after = state_of(learner)
    assert before.keys() == after.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def test_the_losses_survive_json(learner: Learner) -> None:
    """As the manifest keeps them."""
    one, other = fallback(learner), fallback(learner)
    one.measure(0, EXAMPLES)
    other.load_json(one.to_json())
    assert other.status == one.status
