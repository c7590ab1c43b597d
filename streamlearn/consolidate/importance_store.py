"""How the importance of several regimes adds up to what the anchors hold."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


class ImportanceStore(Protocol):
    """Importance by regime slot; it writes what is held into the tensors of `Anchors.importance`, in place."""

    def add(self, slot: int, importance: Mapping[str, Tensor], weight: Mapping[str, Tensor] | None = None) -> None:
        """Take in what the regime in `slot` was measured to need, at the end of its segment.

        Args:
            slot: The regime's slot.
            importance: Omega_t by parameter (`BANK.A`, `BANK.B`), of the shape of the held tensors.
            weight: h of CP-MoE eq. 13 by bank, (H, K); None: 1 for all experts.
        """

    def enter(self, slot: int) -> None:
        """Make the regime in `slot` the one in training."""

    def release(self, slot: int) -> None:
        """Remove the importance of the regime in `slot`."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a snapshot beside those of the anchors, not copied."""

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; other tensors are ignored."""


def expanded(weight_HK: Tensor, like: Tensor) -> Tensor:
    """Give a value per expert the number of dimensions of a parameter, (H, K, 1, ...)."""
    return weight_HK.view(*weight_HK.shape, *[1] * (like.ndim - 2))


def bank_of(name: str) -> str:
    """Return the bank of a parameter's name."""
    return name.rpartition(".")[0]


def expert_sums(parameter: Tensor) -> Tensor:
    """Sum over all dimensions except heads and experts, (H, K)."""
    return torch.sum(parameter.flatten(2), 2)
