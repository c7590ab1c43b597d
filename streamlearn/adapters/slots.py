"""Tensors with a value per regime slot."""

import torch
from torch import Tensor


@torch.no_grad()
def copy_slots(target: Tensor, saved: Tensor) -> None:
    """Copy values saved with at most as many slots, in the last dimension; further slots get zero.

    `shift.max_regimes` may have grown since.
    """
    target.zero_()
    target[..., : saved.shape[-1]].copy_(saved)
