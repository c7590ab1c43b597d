"""Orthogonal low-rank adaptation: every task trains a LoRA of its own, beside those before it.

    L = L_task + lambda sum_{i<t} sum_{jk} |A_i A_t^T|_jk                                       (1)

Wang et al. 2023, eq. 6 to 8. Earlier LoRAs are frozen and all are summed in the forward pass, which is what one LoRA
does whose rank is cut into a block for each task; blocks of later tasks have B = 0. Each block has the full rank of
`lora`, so that, the sum being foldable into the backbone, a token's budget is the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.decode import Example

STRENGTH = 0.5
"""lambda_1 of the authors' published runs."""


class OLora(Baseline):
    """Eq. (1); the adapter is one ungated expert whose rank is `rank` times the number of stretches."""

    def __init__(self, learner: Learner, *, seed: int, rank: int, strength: float = STRENGTH) -> None:
        super().__init__(learner, seed=seed)
        self._rank = rank
        self._strength = strength
        self._own = slice(0, rank)
        for bank in learner.banks:
            bank.A.register_post_accumulate_grad_hook(self._add_penalty)  # type: ignore[no-untyped-call]

    def begin(self, stretch: int, examples: Sequence[Example]) -> None:
        """From now on the stretch's own block is trained, with an optimizer that knows nothing of the others."""
        del examples
        self._own = slice(stretch * self._rank, (stretch + 1) * self._rank)
        for group in self.learner.optimizer.groups:
            group.steps_HK.zero_()
            for moment in group.moments.values():
                moment.zero_()

    @torch.no_grad()
    def step(self, examples: Sequence[Example]) -> Step:
        """One step of the task's own block; weight decay must not reach the others, so they are put back."""
        parameters = self.learner.optimizer.parameters()
        before = [parameter.clone() for parameter in parameters]
        with torch.enable_grad():
            step = self.learner.step(examples)
        for parameter, old in zip(parameters, before, strict=True):
            old[:, :, self._own] = parameter[:, :, self._own]
            parameter.copy_(old)
        return step

    @torch.no_grad()
    def _add_penalty(self, A_11RS: Tensor) -> None:
        """(1)'s gradient, to the task's own block."""
        if self._own.start and A_11RS.grad is not None:
            earlier_PS, own_RS = A_11RS[0, 0, : self._own.start], A_11RS[0, 0, self._own]
            A_11RS.grad[0, 0, self._own].add_(overlap_gradient(earlier_PS, own_RS), alpha=self._strength)


def overlap_gradient(earlier_PS: Tensor, own_RS: Tensor) -> Tensor:
    """d/dA_t of sum |A_i A_t^T|: sign(A_t A_i^T) A_i, the earlier ranks one behind another."""
    return torch.sign(own_RS @ earlier_PS.mT) @ earlier_PS
