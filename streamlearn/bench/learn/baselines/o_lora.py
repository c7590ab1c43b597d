"""Orthogonal low-rank adaptation (O-LoRA): each task trains its own LoRA next to the earlier ones.

    L = L_task + lambda sum_{i<t} sum_{jk} |A_i A_t^T|_jk                                       (1)

Wang et al. 2023, eq. 6 to 8. Earlier LoRAs are frozen, and the forward pass sums all of them. One LoRA whose rank is
divided into a block per task computes the same; the blocks of later tasks have B = 0. Each block has the full rank of
`lora`: the sum can be merged into the backbone, so the cost per token is the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.decode import Example

STRENGTH = 0.5
"""lambda_1 of the runs that the authors published."""


class OLora(Baseline):
    """O-LoRA, eq. (1); the adapter is one ungated expert of `rank` times the number of segments."""

    def __init__(self, learner: Learner, *, seed: int, rank: int, strength: float = STRENGTH) -> None:
        super().__init__(learner, seed=seed)
        self._rank = rank
        self._strength = strength
        self._own = slice(0, rank)
        for bank in learner.banks:
            bank.A.register_post_accumulate_grad_hook(self._add_penalty)  # type: ignore[no-untyped-call]

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Select the segment's block for training and reset the optimizer's moments."""
        del examples
        self._own = slice(segment * self._rank, (segment + 1) * self._rank)
        for group in self.learner.optimizer.groups:
            group.steps_HK.zero_()
            for moment in group.moments.values():
                moment.zero_()

    @torch.no_grad()
    def step(self, examples: Sequence[Example]) -> Step:
        """Train the segment's block on one batch; the other blocks are restored, since weight decay moves them too."""
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
        """Add the gradient of the penalty in (1) to the segment's block."""
        if self._own.start and A_11RS.grad is not None:
            earlier_PS, own_RS = A_11RS[0, 0, : self._own.start], A_11RS[0, 0, self._own]
            A_11RS.grad[0, 0, self._own].add_(overlap_gradient(earlier_PS, own_RS), alpha=self._strength)


def overlap_gradient(earlier_PS: Tensor, own_RS: Tensor) -> Tensor:
    """Return d/dA_t of sum |A_i A_t^T|, which is sign(A_t A_i^T) A_i; the earlier blocks are stacked along the rank."""
    return torch.sign(own_RS @ earlier_PS.mT) @ earlier_PS
