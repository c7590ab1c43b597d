"""The empirical Fisher information."""

import torch

from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.baselines.fisher import fisher, normalised
from streamlearn.adapters.context import routing_context
from streamlearn.learner.loss import pack, packed_loss
from tests.benchmarks.learn.baselines.tasks import ONE, learn
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
    found = fisher(learner, ONE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert all(parameter.grad is None for parameter in parameters)


def test_information_is_normalised_over_all_parameters() -> None:
    """The mean is 1 whatever the scale; ratios stay; nothing stays nothing."""
    raw = [torch.tensor([1.0, 2.0]), torch.tensor([[9.0]])]
    for scale in (1.0, 1e6):
        one, other = normalised([scale * each for each in raw])
        torch.testing.assert_close(one, torch.tensor([0.25, 0.5]))
        torch.testing.assert_close(other, torch.tensor([[2.25]]))
    assert normalised([torch.zeros(2)])[0].tolist() == [0.0, 0.0]
