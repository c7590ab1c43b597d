"""Gradient episodic memory: a step may not raise the loss on the records kept of any earlier task.

    minimise 1/2 |g - z|^2  subject to  <z, g_k> >= 0 for every earlier task k                 (1)
    z = G^T v + g,  v = argmin_{v >= 0} 1/2 v^T G G^T v + g^T G^T v                            (2)

Lopez-Paz and Ranzato 2017, eq. 8 and 11; G has the gradients g_k in its rows. (2) is a non-negative least squares
problem. The gradient that is projected has been clipped before, which (1) does not mind: it is homogeneous in g.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from streamlearn.adapters.routing_context import routing_context
from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.optimizer import MaskedAdamW
from streamlearn.learner.packing import pack
from streamlearn.settings import LearnerSettings
from streamlearn.stream.decode import Example

RECORDS_PER_TASK = 10
"""As many as `replay` has on average."""
RIDGE = 1e-6
"""Of the mean squared length of the g_k, added to the diagonal of G G^T: near-parallel gradients make it singular."""


class Gem(Baseline):
    """Eq. (1); the memory holds the last records of each task."""

    def __init__(self, learner: Learner, *, seed: int, settings: LearnerSettings) -> None:
        super().__init__(learner, seed=seed)
        self.memory: list[list[Example]] = []
        self._projecting = Projecting(learner.optimizer.groups, settings)
        learner.optimizer = self._projecting

    def step(self, examples: Sequence[Example]) -> Step:
        """Take the memories' gradients, then a step along what they allow."""
        self._projecting.references = [self._gradient(kept) for kept in self.memory]
        return self.learner.step(examples)

    def end(self, stretch: int, examples: Sequence[Example]) -> None:
        """Keep a few of its records."""
        del stretch
        self.memory.append(list(examples[-RECORDS_PER_TASK:]))

    def _gradient(self, examples: Sequence[Example]) -> Tensor:
        row = pack(examples, self.learner.device)
        parameters = self.learner.optimizer.parameters()
        with routing_context(self.learner.model, row.context()):
            loss = packed_loss(self.learner.forward, row).mean
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


class Projecting(MaskedAdamW):
    """Changes the gradients by (2) before it uses them."""

    references: Sequence[Tensor] = ()
    """The g_k."""

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """See `MaskedAdamW.step`."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.references and len(parameters) == len(self.parameters()):
            allowed = project(torch.cat([g.flatten() for g in gradients]), torch.stack(list(self.references)))
            for gradient, part in zip(gradients, torch.split(allowed, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        super().step(lr)


def project(g: Tensor, G: Tensor) -> Tensor:
    """Eq. (2): the nearest vector to g, (P,), that has no negative product with a row of G, (K, P)."""
    if bool((G @ g >= 0).all()):
        return g
    gram = (G @ G.T).double().cpu().numpy()
    gram += RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    lower = np.linalg.cholesky(gram)  # 1/2 |L^T v + L^-1 G g|^2 has the gradient of (2)
    v, _ = nnls(lower.T, -np.linalg.solve(lower, (G @ g).double().cpu().numpy()))
    return g + torch.from_numpy(v).to(g) @ G
