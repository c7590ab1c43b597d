"""Orthogonal low-rank adaptation (O-LoRA): each task trains its own LoRA next to the earlier ones.

    L = L_task + lambda sum_{i<t} sum_{jk} |A_i A_t^T|_jk                                       (1)

Wang et al. 2023, eq. 6 to 8. Earlier LoRAs are frozen, and the forward pass sums all of them, see `rank_blocks`.
"""

import torch
from torch import Tensor

from benchmarks.learn.baselines.rank_blocks import RankBlocks
from streamlearn.learner.learner import Learner

STRENGTH = 0.5
"""lambda_1 of the runs that the authors published."""


class OLora(RankBlocks):
    """O-LoRA, eq. (1)."""

    def __init__(self, learner: Learner, *, seed: int, rank: int, strength: float = STRENGTH) -> None:
        super().__init__(learner, seed=seed, rank=rank)
        self._strength = strength
        self.regularizer = self._overlaps

    def _overlaps(self) -> Tensor:
        """Compute the second term of eq. (1), over all linears."""
        overlaps = [overlap(bank.A[0, 0, self.earlier].detach(), bank.A[0, 0, self.own]) for bank in self.learner.banks]
        return self._strength * torch.stack(overlaps).sum()


def overlap(earlier_PS: Tensor, own_RS: Tensor) -> Tensor:
    """Compute sum |A_i A_t^T|; the A_i are stacked along the rank."""
    return (earlier_PS @ own_RS.mT).abs().sum()
