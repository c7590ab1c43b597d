"""One LoRA per task, side by side in the rank of one adapter.

The forward pass sums all LoRAs. One ungated expert whose rank is divided into blocks computes the same sum; the blocks
that no task has used yet have B = 0. Each block has the full rank of `lora`: the sum can be merged into the backbone,
so the cost per token is that of one LoRA.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.record import Example


class RankBlocks(Baseline):
    """One block is trained at a time; the others are frozen."""

    def __init__(self, learner: Learner, *, seed: int, rank: int) -> None:
        super().__init__(learner, seed=seed)
        self.rank = rank
        self.block = 0
        """The block in training."""
        self.regularizer: Callable[[], Tensor] | None = None
        """A further term of the objective, a scalar; computed only when there are earlier blocks."""
        for bank in learner.banks:
            for parameter in (bank.A, bank.B):
                parameter.register_hook(self.only_own)  # type: ignore[no-untyped-call]

    @property
    def own(self) -> slice:
        """Ranks of the block in training."""
        return slice(self.block * self.rank, (self.block + 1) * self.rank)

    @property
    def earlier(self) -> slice:
        """Ranks of all blocks before it."""
        return slice(0, self.block * self.rank)

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Train the segment's block from here on."""
        del examples
        self.open(segment)

    def open(self, block: int) -> None:
        """Train another block from here on and reset the optimizer's moments."""
        self.block = block
        for group in self.learner.optimizer.groups:
            group.restart()

    def step(self, examples: Sequence[Example]) -> Step:
        """Train the block on one batch; the other blocks are restored, since weight decay moves them too."""
        parameters = self.learner.optimizer.parameters()
        before = [parameter.detach().clone() for parameter in parameters]
        step = self.learner.step(examples, penalty=self.regularizer if self.block else None)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                old[:, :, self.own] = parameter[:, :, self.own]
                parameter.copy_(old)
        return step

    def only_own(self, gradient_11RN: Tensor) -> Tensor:
        """Return a gradient that is zero outside the block in training: clipping must not count the frozen ones."""
        kept_11RN = torch.zeros_like(gradient_11RN)
        kept_11RN[:, :, self.own] = gradient_11RN[:, :, self.own]
        return kept_11RN
