"""Elastic weight consolidation."""

from typing import Any

import pytest
import torch

from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.baselines.ewc import Ewc, OnlineEwc
from benchmarks.learn.baselines.fisher import fisher, normalised
from tests.benchmarks.learn.baselines.tasks import ONE, TWO, learn, loss_on
from tests.learners import MakeLearner


@pytest.mark.parametrize("kind", [Ewc, OnlineEwc])
def test_the_penaltys_gradient_is_that_of_the_equation(make_learner: MakeLearner, kind: Any) -> None:
    """EWC sums the tasks' quadratics, eq. (1); online EWC lets the older fade and pulls to the newest, eq. (2)."""
    learner = make_learner(preset="lora")
    ewc = kind(learner, seed=0, strength=6.0)
    tasks = []
    for number, examples in enumerate((ONE, TWO)):
        learn(Baseline(learner, seed=0), examples, steps=4)
        information = normalised(fisher(learner, examples))
        tasks.append((information, [p.detach().clone() for p in learner.optimizer.parameters()]))
        ewc.end(number, examples)
    learn(Baseline(learner, seed=0), ONE, steps=2)
    (first, at_first), (second, at_second) = tasks
    holds = [hold for group in learner.optimizer.groups for hold in group.holds.values()]
    for place, (theta, hold) in enumerate(zip(learner.optimizer.parameters(), holds, strict=True)):
        if kind is Ewc:
            expected = first[place] * (theta - at_first[place]) + second[place] * (theta - at_second[place])
        else:
            expected = (0.95 * first[place] + second[place]) * (theta - at_second[place])
        held = 2 * hold.strength * hold.importance * (theta - hold.anchor)
        torch.testing.assert_close(held, 6.0 * expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [Ewc, OnlineEwc])
def test_it_keeps_what_a_plain_learner_forgets(make_learner: MakeLearner, kind: Any) -> None:
    """A strong penalty keeps the first task's loss; without strength it rises as in plain training."""
    after = {}
    for strength in (None, 0.0, 1e2):
        learner = make_learner(preset="lora")
        method = Baseline(learner, seed=0) if strength is None else kind(learner, seed=0, strength=strength)
        learn(method, ONE)
        before = loss_on(learner, ONE)
        learn(method, TWO)
        after[strength] = loss_on(learner, ONE) - before
    assert after[0.0] == after[None]
    assert after[None] > 0.5
    assert after[1e2] < 0.1 * after[None]
