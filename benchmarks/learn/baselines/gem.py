"""Gradient episodic memory: no step may raise the loss on the stored records of an earlier task.

    minimise 1/2 |g - z|^2  subject to  <z, g_k> >= 0 for every earlier task k                 (1)
    z = G^T v + g,  v = argmin_{v >= 0} 1/2 v^T G G^T v + g^T G^T v                            (2)

Lopez-Paz and Ranzato 2017, eq. 8 and 11; the rows of G are the gradients g_k. (2) is a non-negative least squares
problem. The gradient is clipped before it is projected; (1) is homogeneous in g, so the order does not matter.

Simplified: the projected gradient is the input of AdamW, as in all methods here, so (1) holds for what the optimizer is
given and not exactly for its step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from benchmarks.learn.baselines.baseline import Baseline
from streamlearn.adapters.context import routing_context
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.learner.optimizer import MaskedAdamW
from streamlearn.settings import LearnerSettings
from streamlearn.stream.record import Example

RIDGE = 1e-6
"""Multiple of the mean |g_k|^2 added to the diagonal of G G^T, which near-parallel gradients make singular."""


class Gem(Baseline):
    """Gradient episodic memory, eq. (1); the memory holds the last `records` of each segment."""

    def __init__(self, learner: Learner, *, seed: int, settings: LearnerSettings, records: int) -> None:
        super().__init__(learner, seed=seed)
        self._records = records
        self.memory: list[list[Example]] = []
        self._optimizer = ProjectedAdamW(learner.optimizer.groups, settings)
        learner.optimizer = self._optimizer

    def step(self, examples: Sequence[Example]) -> Step:
        """Compute the gradients on the memory, then step along the projected gradient."""
        self._optimizer.references = [self._gradient(stored) for stored in self.memory]
        return self.learner.step(examples)

    def end(self, segment: int, examples: Sequence[Example]) -> None:
        """Store the segment's last records."""
        del segment
        self.memory.append(list(examples[-self._records :]))

    def _gradient(self, examples: Sequence[Example]) -> Tensor:
        packed = pack(examples, self.learner.device)
        parameters = self.learner.optimizer.parameters()
        with routing_context(self.learner.model, packed.context()):
            loss = packed_loss(self.learner.forward, packed).mean
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


class ProjectedAdamW(MaskedAdamW):
    """`MaskedAdamW` on gradients projected by (2)."""

    references: Sequence[Tensor] = ()
    """The g_k."""

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Project the gradients, then take a step; see `MaskedAdamW.step`."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.references and len(parameters) == len(self.parameters()):
            allowed = project(torch.cat([g.flatten() for g in gradients]), torch.stack(list(self.references)))
            for gradient, part in zip(gradients, torch.split(allowed, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        super().step(lr)


def project(g: Tensor, G: Tensor) -> Tensor:
    """Return the vector nearest to g (P,) whose product with no row of G (K, P) is negative, eq. (2)."""
    if bool((G @ g >= 0).all()):
        return g
    gram = (G @ G.T).double().cpu().numpy()
    gram += RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    lower = np.linalg.cholesky(gram)  # 1/2 |L^T v + L^-1 G g|^2 has the gradient of (2)
    v, _ = nnls(lower.T, -np.linalg.solve(lower, (G @ g).double().cpu().numpy()))
    return g + torch.from_numpy(v).to(g) @ G
