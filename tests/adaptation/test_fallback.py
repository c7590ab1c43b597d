"""What answers the unknown: the lower of two losses that are measured on hold-out records."""

from collections.abc import Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from streamlearn.adaptation.fallback import Fallback
from streamlearn.adapters.routing_context import NO_REGIME
from streamlearn.learner.evaluation import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Example
from tests.doubles import random_examples
from tests.learner.reference import train
from tests.learners import MakeLearner, state_of

EXAMPLES = random_examples([9, 7, 8], prompt_length=4)


@pytest.fixture
def learner(make_learner: MakeLearner) -> Learner:
    learner = make_learner(lr=3e-2)
    train(learner, range(4))
    return learner


def fallback(learner: Learner, setting: Any = "auto", *, other: int = 1, has_regimes: bool = True) -> Fallback:
    """With the regime in the slot `other` nearest to everything."""

    def assign_to_other(inputs: Sequence[NDArray[Any]], excluded: int) -> list[int]:
        assert excluded != other
        return [other] * len(inputs)

    return Fallback(learner, setting, assign_to_other, has_regimes=has_regimes, pack_tokens=64)


def mean_loss(learner: Learner, examples: Sequence[Example], slot: int) -> float:
    """Each record counts alike, however many tokens it has."""
    work = score(learner.model, examples, learner.device, pack_tokens=64, slots=[slot] * len(examples))
    scores = run_to_end(work)
    return sum(each.loss_sum / each.tokens for each in scores) / len(scores)


def test_the_losses_are_those_of_the_other_regime_and_of_the_backbone(learner: Learner) -> None:
    """Over the records of all measured regimes; the lower one decides."""
    found = fallback(learner)
    found.measure(0, EXAMPLES)
    found.measure(2, EXAMPLES[:1])
    records = [*EXAMPLES, EXAMPLES[0]]
    status = found.status
    assert status.records == 4
    assert status.nearest_loss == pytest.approx(mean_loss(learner, records, 1), rel=1e-5)
    assert status.backbone_loss == pytest.approx(mean_loss(learner, records, NO_REGIME), rel=1e-5)
    assert status.nearest_loss is not None
    assert status.backbone_loss is not None
    assert found.uses_backbone is (status.backbone_loss <= status.nearest_loss)
    assert status.answered_by == ("backbone" if found.uses_backbone else "nearest")


def test_either_may_win(learner: Learner) -> None:
    """Records that the adapter was trained on: the nearest; with the same effect against it: the backbone."""
    trained = random_examples([6, 9, 12], seed=0, prompt_length=1)
    helpful, harmful = fallback(learner), fallback(learner)
    for _ in range(8):
        learner.step(trained, [1] * len(trained))
    helpful.measure(0, trained)
    assert not helpful.uses_backbone
    for bank in learner.banks:
        bank.B.data.neg_()
    harmful.measure(0, trained)
    assert harmful.uses_backbone


def test_without_a_measurement_the_backbone_answers(learner: Learner) -> None:
    """As while one regime is remembered, or after its losses were dropped."""
    found = fallback(learner)
    assert found.uses_backbone
    found.measure(0, EXAMPLES)
    found.forget(0)
    assert found.status == fallback(learner).status
    assert (found.status.nearest_loss, found.status.answered_by) == (None, "backbone")


@pytest.mark.parametrize("setting", ["nearest", "backbone"])
def test_a_setting_is_obeyed_without_measuring(learner: Learner, setting: Any) -> None:
    found = fallback(learner, setting)
    assert not found.is_measured
    assert found.uses_backbone is (setting == "backbone")


def test_where_routing_has_no_regimes_the_adapter_answers(learner: Learner) -> None:
    """There is no other regime's loss to measure; only the setting chooses the backbone."""
    assert not fallback(learner, has_regimes=False).uses_backbone
    assert not fallback(learner, has_regimes=False).is_measured
    assert fallback(learner, "backbone", has_regimes=False).uses_backbone


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
