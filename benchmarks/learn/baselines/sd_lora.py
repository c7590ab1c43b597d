"""SD-LoRA: each task trains its own LoRA and rescales the earlier ones, whose directions are frozen.

    W = W_0 + sum_{k<t} a_k D_k + B_t A_t,  D_k = B_k A_k / |B_k A_k|_F                         (1)

Wu et al. 2025, "SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning": in task t, the
magnitudes a_k of all earlier directions and the new LoRA are trained; inference uses the last W for all tasks. B_k of
the adapter holds a_k B_k / |B_k A_k|_F, so the gradient of a_k is the product of its gradient with the direction:

    dL/da_k = <dL/dB_k, B_k / |B_k A_k|_F>                                                      (2)

Simplified: the new LoRA has no magnitude of its own while it is trained, since B_t contains it. Magnitudes have their
own learning rate, a multiple of the common one. The paper's variants of lower rank are left out.
"""
# Shape suffixes: P ranks of the earlier blocks, R rank of a block, N blocks, S in, O out features.

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.learn.baselines.rank_blocks import RankBlocks
from streamlearn.adapters.tuner import Bank
from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.record import Example

MAGNITUDE_LR = 10.0
"""Learning rate of the magnitudes, as a multiple of that of the weights, which are a hundred times smaller."""


class SdLora(RankBlocks):
    """SD-LoRA, eq. (1)."""

    def __init__(
        self, learner: Learner, *, seed: int, rank: int, lr: float, magnitude_lr: float = MAGNITUDE_LR
    ) -> None:
        """`lr`: learning rate of the weights."""
        self.directions = [Directions(bank, rank) for bank in learner.banks]  # their hooks need the whole gradient
        super().__init__(learner, seed=seed, rank=rank)
        self._magnitude_lr = lr * magnitude_lr
        self._optimizer: torch.optim.Optimizer | None = None

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Freeze the direction of the last block and open the segment's."""
        if segment:
            for each in self.directions:
                each.freeze(self.own)
            self._optimizer = torch.optim.Adam([each.magnitude_N for each in self.directions], lr=self._magnitude_lr)
        super().begin(segment, examples)

    def step(self, examples: Sequence[Example]) -> Step:
        """Train the block and the earlier magnitudes on one batch."""
        step = super().step(examples)
        if self._optimizer is not None:
            if step.refusal is None:
                self._optimizer.step()
            self._optimizer.zero_grad()
            for each in self.directions:
                each.apply()
        return step


class Directions:
    """Frozen directions of one linear, and their magnitudes."""

    def __init__(self, bank: Bank, rank: int) -> None:
        self._bank = bank
        self._rank = rank
        self.B_PO = bank.B.detach()[0, 0, :0].clone()
        """B_k / |B_k A_k|_F of the frozen blocks."""
        self.magnitude_N = Parameter(self.B_PO.new_zeros(0))
        """a_k."""
        bank.B.register_hook(self._backward)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def freeze(self, block: slice) -> None:
        """Add a block: its direction, and its norm as magnitude, so that the function stays the same."""
        A_RS, B_RO = self._bank.A[0, 0, block], self._bank.B[0, 0, block]
        norm = ((A_RS @ A_RS.mT) * (B_RO @ B_RO.mT)).sum().clamp_min(torch.finfo(B_RO.dtype).tiny).sqrt()
        self.B_PO = torch.cat([self.B_PO, B_RO / norm])
        self.magnitude_N = Parameter(torch.cat([self.magnitude_N, norm[None]]))

    @torch.no_grad()
    def apply(self) -> None:
        """Write the frozen blocks of B."""
        scaled_PO = self.magnitude_N.repeat_interleave(self._rank)[:, None] * self.B_PO
        self._bank.B[0, 0, : len(scaled_PO)] = scaled_PO

    def _backward(self, gradient_11RO: Tensor) -> None:
        """Add eq. (2)."""
        frozen = len(self.B_PO)
        product_N = (gradient_11RO[0, 0, :frozen] * self.B_PO).view(-1, self._rank * self.B_PO.shape[1]).sum(1)
        before = self.magnitude_N.grad
        self.magnitude_N.grad = product_N if before is None else before + product_N
