"""Elastic weight consolidation, with a penalty per task or one for all.

    L = L_task + (lambda / 2) sum_t F_t (theta - theta*_t)^2                                    (1)
    L = L_task + (lambda / 2) F* (theta - theta*)^2,  F* <- gamma F* + F_t, theta* the newest   (2)

(1) is Kirkpatrick et al. 2017, eq. 3, with one penalty per earlier task; (2) is online EWC, Schwarz et al. 2018,
section 4. F_t is the diagonal of the empirical Fisher matrix, normalised per task (`fisher`, eq. 1 and 2), so that
lambda has the same meaning for all tasks and backbones. A sum of quadratics is one quadratic around a weighted mean,
which the optimizer accepts:

    sum_t F_t (theta - theta*_t)^2 = F (theta - a)^2 + const,  F = sum_t F_t,  a = sum_t F_t theta*_t / F  (3)
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.baselines.fisher import fisher, normalised
from streamlearn.learner.learner import Learner
from streamlearn.learner.optimizer import Group, Hold
from streamlearn.stream.record import Example

STRENGTH = 0.1
"""lambda."""
GAMMA = 0.95
"""gamma of eq. (2): how much of the earlier information a new task keeps."""
FISHER_RECORDS = 64
"""Number of records per task for F_t."""


class Ewc(Baseline):
    """Elastic weight consolidation, eq. (1)."""

    def __init__(self, learner: Learner, *, seed: int, strength: float = STRENGTH) -> None:
        super().__init__(learner, seed=seed)
        self._strength = strength
        self._weighted = {id(parameter): torch.zeros_like(parameter) for _, _, parameter in self._parameters()}

    @torch.no_grad()
    def end(self, segment: int, examples: Sequence[Example]) -> None:
        """Add the segment's Fisher information to the penalty."""
        picked = torch.randperm(len(examples), generator=torch.Generator().manual_seed(self.seed * 1009 + segment))
        information = normalised(fisher(self.learner, [examples[i] for i in picked[:FISHER_RECORDS].tolist()]))
        for (group, name, parameter), task_fisher in zip(self._parameters(), information, strict=True):
            group.holds[name] = self._hold(group.holds.get(name), parameter, task_fisher)

    def _hold(self, before: Hold | None, parameter: Parameter, task_fisher: Tensor) -> Hold:
        """Return the penalty after this task, eq. (3)."""
        total = task_fisher if before is None else task_fisher + before.importance
        weighted = self._weighted[id(parameter)].addcmul_(task_fisher, parameter)
        return Hold(total, torch.where(total > 0, weighted / total, parameter), self._strength / 2)

    def _parameters(self) -> Iterator[tuple[Group, str, Parameter]]:
        for group in self.learner.optimizer.groups:
            for name, parameter in group.parameters.items():
                yield group, name, parameter


class OnlineEwc(Ewc):
    """Online EWC, eq. (2)."""

    def __init__(self, learner: Learner, *, seed: int, strength: float = STRENGTH, gamma: float = GAMMA) -> None:
        super().__init__(learner, seed=seed, strength=strength)
        self._gamma = gamma

    def _hold(self, before: Hold | None, parameter: Parameter, task_fisher: Tensor) -> Hold:
        """Return the penalty after this task, eq. (2)."""
        total = task_fisher if before is None else self._gamma * before.importance + task_fisher
        return Hold(total, parameter.detach().clone(), self._strength / 2)
