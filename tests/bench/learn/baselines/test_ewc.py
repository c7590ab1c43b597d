"""Elastic weight consolidation."""

import torch

from streamlearn.adapters.routing_context import routing_context
from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.bench.learn.baselines.ewc import Ewc
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.packing import pack
from tests.bench.learn.baselines.tasks import ONE, TWO, learn, loss_on
from tests.learners import MakeLearner


def test_fisher_is_the_mean_of_squared_gradients_of_single_records(make_learner: MakeLearner) -> None:
    """It is not the square of their mean; the log-likelihood is a sum over the answer tokens."""
    learner = make_learner(preset="lora")
    learn(Baseline(learner, seed=0), ONE, steps=3)
    parameters = learner.optimizer.parameters()
    expected = [torch.zeros_like(p) for p in parameters]
    for example in ONE:
        packed = pack([example], learner.device)
        with routing_context(learner.model, packed.context()):
            torch.autograd.backward(packed_loss(learner.forward, packed).mean * len(packed.target_L))
        for square, parameter in zip(expected, parameters, strict=True):
            assert parameter.grad is not None
            square.add_(parameter.grad**2 / len(ONE))
        learner.optimizer.zero_grad()
    found = Ewc(learner, seed=0).fisher(ONE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert all(parameter.grad is None for parameter in parameters)


def test_the_hold_is_the_sum_of_every_earlier_tasks_quadratic(make_learner: MakeLearner) -> None:
    """Its gradient at any point equals that of eq. (1), summed task by task."""
    learner = make_learner(preset="lora")
    ewc = Ewc(learner, seed=0, strength=6.0)
    tasks = []
    for number, examples in enumerate((ONE, TWO)):
        learn(Baseline(learner, seed=0), examples, steps=4)
        tasks.append((ewc.fisher(examples), [p.detach().clone() for p in learner.optimizer.parameters()]))
        ewc.end(number, examples)
    learn(Baseline(learner, seed=0), ONE, steps=2)
    holds = [hold for group in learner.optimizer.groups for hold in group.holds.values()]
    for place, (theta, hold) in enumerate(zip(learner.optimizer.parameters(), holds, strict=True)):
        expected = sum((6.0 * fisher[place] * (theta - old[place]) for fisher, old in tasks), torch.zeros(()))
        held = 2 * hold.strength * hold.importance * (theta - hold.anchor)
        torch.testing.assert_close(held, expected, rtol=1e-3, atol=1e-6)


def test_it_keeps_what_a_plain_learner_forgets(make_learner: MakeLearner) -> None:
    """A strong penalty keeps the first task's loss; without strength it rises as in plain training."""
    after = {}
    for strength in (None, 0.0, 1e5):
        learner = make_learner(preset="lora")
        method = Baseline(learner, seed=0) if strength is None else Ewc(learner, seed=0, strength=strength)
        learn(method, ONE)
        before = loss_on(learner, ONE)
        learn(method, TWO)
        after[strength] = loss_on(learner, ONE) - before
    assert after[0.0] == after[None]
    assert after[None] > 0.5
    assert after[1e5] < 0.1 * after[None]
