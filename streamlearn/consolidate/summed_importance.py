"""Importance as CP-MoE publishes it: every segment adds to one sum, which holds all regimes.

    Omega^(i) <- Omega^(i) + h_i Omega_t                                                       (1)

CP-MoE (arXiv 2605.20247) eq. 13. The sum has no bound: a regime that lasts or returns adds every time, and is held by
its own importance when it returns. The contribution of each regime to an expert's total is kept as one number per
expert and slot, so `release` multiplies the expert's Omega by the other regimes' fraction.
"""
# Shape suffixes: H heads, K experts a head, N regime slots.

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from streamlearn.adapters.model import Bank
from streamlearn.adapters.slots import copy_slots
from streamlearn.consolidate.importance_store import bank_of, expanded, expert_sums


class SummedImportance:
    """Eq. (1), an `ImportanceStore`."""

    def __init__(self, held: Mapping[str, Tensor], banks: Sequence[Bank], regimes: int) -> None:
        """`held`: the tensors of `Anchors.importance`."""
        self._held = held
        self.mass: dict[str, Tensor] = {
            bank.name: torch.zeros(*bank.A.shape[:2], regimes, device=bank.A.device) for bank in banks
        }
        """Importance added by each slot to each expert, summed over the expert's weights, (H, K, N) by bank."""

    @torch.no_grad()
    def add(self, slot: int, importance: Mapping[str, Tensor], weight: Mapping[str, Tensor] | None = None) -> None:
        """Apply eq. (1)."""
        for name, omega in self._held.items():
            if weight is None:
                omega.add_(importance[name])
            else:
                omega.addcmul_(importance[name], expanded(weight[bank_of(name)], omega))
        for bank, mass_HKN in self.mass.items():
            added_HK = expert_sums(importance[f"{bank}.A"]) + expert_sums(importance[f"{bank}.B"])
            mass_HKN[:, :, slot] += added_HK if weight is None else added_HK * weight[bank]

    def enter(self, slot: int) -> None:
        """Do nothing: the sum holds every regime, also the one that made it."""

    @torch.no_grad()
    def release(self, slot: int) -> None:
        """Reduce every expert's importance by the fraction that the regime in `slot` added."""
        fraction = {}
        for bank, mass_HKN in self.mass.items():
            total_HK = mass_HKN.sum(2)
            fraction[bank] = torch.where(total_HK > 0, mass_HKN[:, :, slot] / total_HK, 0.0)
            mass_HKN[:, :, slot] = 0.0
        for name, omega in self._held.items():
            omega.mul_(1 - expanded(fraction[bank_of(name)], omega))

    def state(self) -> dict[str, Tensor]:
        """Return the masses."""
        return {f"consolidate.mass.{bank}": mass_HKN for bank, mass_HKN in self.mass.items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, in place."""
        for name, tensor in self.state().items():
            copy_slots(tensor, tensors[name])
