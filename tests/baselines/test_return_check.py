"""Whether records belong to the regime that their inputs look like."""

import numpy as np
import pytest
import torch

from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.regimes.returns import ReturnCheck, check_return
from tests.doubles import random_examples
from tests.learners import MakeLearner, make_learner, snapshot, tiny

__all__ = ["make_learner", "tiny"]  # fixtures

OWN = random_examples([12, 9, 14, 11, 10, 13, 12, 9], prompt_length=4, seed=5)
OTHERS = random_examples([11, 10, 13, 12, 9, 12, 14, 10], prompt_length=4, seed=6)


@pytest.fixture
def learner(make_learner: MakeLearner) -> Learner:
    """Regime 0 was trained on its records."""
    made = make_learner(preset="streamlearn", lr=1e-2)
    for _ in range(8):
        made.step(OWN, [0] * len(OWN))
    return made


def losses_of(learner: Learner, slot: int) -> list[float]:
    scores = run_to_end(score(learner.model, OWN, learner.device, pack_tokens=999, slots=[slot] * len(OWN)))
    return [each.loss_sum / each.tokens for each in scores]


def test_the_losses_are_those_under_the_regimes_adapter(learner: Learner) -> None:
    """Per record and learned token, in passes of any size."""
    own = losses_of(learner, 0)
    found = check_return(learner, OWN, 0, own, pack_tokens=16)
    assert found.losses == pytest.approx(own, rel=1e-4)
    assert found.losses != pytest.approx(losses_of(learner, 1), rel=1e-2)
    assert found.own_losses == tuple(own)


def test_records_of_another_task_cost_more(learner: Learner) -> None:
    """What the adapter learned does not help them; the regime's own records are not refused."""
    own = losses_of(learner, 0)
    assert check_return(learner, OTHERS, 0, own, pack_tokens=99).p_value < 0.001
    assert check_return(learner, OWN, 0, own, pack_tokens=99).p_value > 0.2


def test_checking_changes_nothing(learner: Learner) -> None:
    """Weights, optimizer, counts and random state."""
    before, rng = snapshot(learner), torch.get_rng_state()
    check_return(learner, OTHERS, 0, [1.0], pack_tokens=64)
    after = snapshot(learner)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("number", [3, 12])
def test_true_returns_are_refused_no_more_often_than_stated(number: int) -> None:
    """Of 2,000 samples of one skewed distribution, at most the level plus three standard errors."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(sigma=1.5, size=(2000, number + 32))
    refused = [ReturnCheck(tuple(row[:number]), tuple(row[number:])).p_value < 0.05 for row in drawn.tolist()]
    assert np.mean(refused) < 0.05 + 3 * (0.05 * 0.95 / 2000) ** 0.5


def test_nothing_is_refused_where_nothing_can_be_compared() -> None:
    """A regime of which no loss is known, as in a snapshot of an older release."""
    assert ReturnCheck((9.0, 8.0), ()).p_value == 1.0
    assert ReturnCheck((), (1.0, 2.0)).p_value == 1.0
