"""Elastic weight consolidation.

    L = L_task + (lambda / 2) sum_t F_t (theta - theta*_t)^2                                    (1)
    F_t = mean over records of task t of (d log p(answer | prompt) / d theta)^2                 (2)

Kirkpatrick et al. 2017, eq. 3, with one penalty per earlier task. (2) is the diagonal of the empirical Fisher matrix.
It needs the gradient of each single record; the squared gradient of a batch mean is a different quantity. log p is the
sum over the answer tokens. A sum of quadratics is one quadratic around a weighted mean, which the optimizer accepts:

    sum_t F_t (theta - theta*_t)^2 = F (theta - a)^2 + const,  F = sum_t F_t,  a = sum_t F_t theta*_t / F  (3)
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.adapters.routing_context import routing_context
from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.optimizer import Group, Hold
from streamlearn.learner.packing import pack
from streamlearn.stream.decode import Example

STRENGTH = 0.3
"""lambda, chosen on SuperNI order 1 with a seed that no result uses.

0.3, 1, 3 and 300 give AP .337, .324, .300, .245 and AF .055, .069, .090, .016. On four tasks 30 was best; over eight
tasks its penalties add up until nothing is learned.
"""
FISHER_RECORDS = 64
"""Number of records per task for (2)."""


class Ewc(Baseline):
    """Elastic weight consolidation, eq. (1)."""

    def __init__(self, learner: Learner, *, seed: int, strength: float = STRENGTH) -> None:
        super().__init__(learner, seed=seed)
        self._strength = strength
        self._weighted = {id(parameter): torch.zeros_like(parameter) for _, _, parameter in self._parameters()}

    @torch.no_grad()
    def end(self, segment: int, examples: Sequence[Example]) -> None:
        """Add the segment's Fisher information to the anchors, eq. (2) and (3)."""
        picked = torch.randperm(len(examples), generator=torch.Generator().manual_seed(self.seed * 1009 + segment))
        fisher = self.fisher([examples[i] for i in picked[:FISHER_RECORDS].tolist()])
        for (group, name, parameter), task_fisher in zip(self._parameters(), fisher, strict=True):
            total = task_fisher + (group.holds[name].importance if name in group.holds else 0.0)
            weighted = self._weighted[id(parameter)].addcmul_(task_fisher, parameter)
            anchor = torch.where(total > 0, weighted / total, parameter)
            group.holds[name] = Hold(total, anchor, self._strength / 2)

    def fisher(self, examples: Sequence[Example]) -> list[Tensor]:
        """Return eq. (2) for each parameter."""
        parameters = [parameter for _, _, parameter in self._parameters()]
        squares = [torch.zeros_like(parameter) for parameter in parameters]
        for example in examples:
            packed = pack([example], self.learner.device)
            with torch.enable_grad(), routing_context(self.learner.model, packed.context()):
                log_likelihood = packed_loss(self.learner.forward, packed).mean * len(packed.target_L)
            gradients = torch.autograd.grad(log_likelihood, parameters)
            for square, gradient in zip(squares, gradients, strict=True):
                square.addcmul_(gradient, gradient, value=1 / len(examples))
        return squares

    def _parameters(self) -> Iterator[tuple[Group, str, Parameter]]:
        for group in self.learner.optimizer.groups:
            for name, parameter in group.parameters.items():
                yield group, name, parameter
