"""How the importance of several regimes adds up to what the anchors hold."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from streamlearn.adapters.tuner import Bank, copy_slots


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


# Importance kept apart by regime: bounded, and never held against the regime that made it.
#
#     Omega_r <- b max(Omega_r, h Omega_t),    b = min(1, 1 / (xi sum_k Omega_rk))                (1)
#     Omega = sum_{r' != r} Omega_r',          r the regime in training                          (2)
#
# Both replace CP-MoE's sum over tasks (arXiv 2605.20247, eq. 13), which a stream without an end cannot use: its regimes
# last and return, and the sum grows with both.
#
# The maximum is taken weight by weight: of several segments of one regime, the one that needed a weight most counts. A
# segment in which nothing was left to learn measures 0 and takes nothing away; one that learns the same again adds
# nothing. b bounds what one regime can contribute, whatever was measured: moving every weight by sqrt(xi) costs at most
# lambda x 1 nat per token in L_reg because of it.
#
# A regime that goes on or returns is held by the others' importance only. Importance is the same for all of the rank
# (`signal_integral`, eq. 4), so each regime takes 1 / R of the adapter's size.


# Shape suffixes: H heads, K experts a head, S slice or O out features.


PREFIX = "consolidate.importance."


class RegimeImportance:
    """Eq. (1) and (2), an `ImportanceStore` of tensors (H, K, 1, S)."""

    def __init__(self, held: Mapping[str, Tensor], ranks: Mapping[str, int], damping: float) -> None:
        """Make an empty store.

        Args:
            held: The tensors of `Anchors.importance`.
            ranks: Rank of each bank.
            damping: xi.
        """
        self._held = held
        self._ranks = ranks
        self._max_sum = 1 / damping
        self._by_slot: dict[int, dict[str, Tensor]] = {}
        self._current: int | None = None

    @torch.no_grad()
    def add(self, slot: int, importance: Mapping[str, Tensor], weight: Mapping[str, Tensor] | None = None) -> None:
        """Apply eq. (1)."""
        found = dict(importance)
        if weight is not None:
            found = {name: omega * expanded(weight[bank_of(name)], omega) for name, omega in found.items()}
        before = self._by_slot.get(slot)
        if before is not None:
            found = {name: torch.maximum(omega, before[name]) for name, omega in found.items()}
        total = torch.stack([omega.sum() * self._ranks[bank_of(name)] for name, omega in found.items()]).sum()
        scale = (self._max_sum / total).clamp_max(1.0)  # infinite for a sum of 0, then 1
        self._by_slot[slot] = {name: omega * scale for name, omega in found.items()}

    @torch.no_grad()
    def enter(self, slot: int) -> None:
        """Apply eq. (2)."""
        self._current = slot
        for name, held in self._held.items():
            held.zero_()
            for other in sorted(self._by_slot.keys() - {slot}):  # in one order: sums are bit-equal after a restart
                held.add_(self._by_slot[other][name])

    def release(self, slot: int) -> None:
        """Remove the importance of the regime in `slot`."""
        self._by_slot.pop(slot, None)
        if self._current is not None:
            self.enter(self._current)

    def state(self) -> dict[str, Tensor]:
        """Return each regime's importance."""
        return {
            f"{PREFIX}{slot}.{name}": omega
            for slot, importance in self._by_slot.items()
            for name, omega in importance.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; `enter` must follow."""
        self._by_slot, self._current = {}, None
        for key, tensor in tensors.items():
            if key.startswith(PREFIX):
                slot, _, name = key.removeprefix(PREFIX).partition(".")
                self._by_slot.setdefault(int(slot), {})[name] = tensor.to(self._held[name].device, copy=True)


# Importance as CP-MoE publishes it: every segment adds to one sum, which holds all regimes.
#
#     Omega^(i) <- Omega^(i) + h_i Omega_t                                                       (1)
#
# CP-MoE (arXiv 2605.20247) eq. 13. The sum has no bound: a regime that lasts or returns adds every time, and is held by
# its own importance when it returns. The contribution of each regime to an expert's total is kept as one number per
# expert and slot, so `release` multiplies the expert's Omega by the other regimes' fraction.


# Shape suffixes: H heads, K experts a head, N regime slots.


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
