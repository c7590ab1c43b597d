"""Two random tasks, and training on them."""

import torch

from benchmarks.learn.baselines.baseline import Baseline
from streamlearn.adapters.context import routing_context
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.stream.record import Example
from tests.doubles import random_examples

ONE, TWO = random_examples((9, 7, 8), seed=1), random_examples((8, 8, 6), seed=2)


def loss_on(learner: Learner, examples: tuple[Example, ...]) -> float:
    """The learner's mean loss per token."""
    packed = pack(examples, learner.device)
    with torch.no_grad(), routing_context(learner.model, packed.context()):
        return float(packed_loss(learner.forward, packed).mean)


def learn(baseline: Baseline, *tasks: tuple[Example, ...], steps: int = 12) -> None:
    """Train on one task after another, each as one segment of equal batches."""
    for number, examples in enumerate(tasks):
        baseline.begin(number, examples)
        for _ in range(steps):
            baseline.step(examples)
        baseline.end(number, examples)
