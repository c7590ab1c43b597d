"""Gradient descent on the transformer baseline."""
# Shape suffixes: K samples, L tokens, D dimensions.

from collections.abc import Callable

import torch
from torch.nn.functional import softplus

from benchmarks.mot.data import Mixture, draw
from benchmarks.mot.training import Schedule, TrainingRun, eval_point
from benchmarks.mot.transformer import MultiHeadTransformer


def train_transformer(
    mixture: Mixture,
    schedule: Schedule,
    build: Callable[[torch.Generator], MultiHeadTransformer],
    *,
    step_size: float,
    seed: int,
) -> TrainingRun:
    """Train all weights at once, on the same distribution and number of samples as the experts."""
    generator = torch.Generator().manual_seed(seed)
    test = draw(mixture, schedule.num_test_samples, generator)
    model = build(generator)
    points = []
    for t in range(1, schedule.iterations + 1):
        samples = draw(mixture, schedule.num_samples, generator)
        loss = softplus(-samples.y_K * model.output(samples.x_KLD)).mean()
        gradients = torch.autograd.grad(loss, model.weights)
        with torch.no_grad():
            torch._foreach_add_(model.weights, gradients, alpha=-step_size)
            if schedule.evaluates_after(t):
                points.append(eval_point(t, test, model.output(test.x_KLD)))
    return TrainingRun(tuple(points), model.num_parameters)
