"""Importance kept apart by regime: bounded, and never held against the regime that made it.

    Omega_r <- b max(Omega_r, h Omega_t),    b = min(1, 1 / (xi sum_k Omega_rk))                (1)
    Omega = sum_{r' != r} Omega_r',          r the regime in training                          (2)

Both replace CP-MoE's sum over tasks (arXiv 2605.20247, eq. 13), which a stream without an end cannot use: its regimes
last and return, and the sum grows with both.

The maximum is taken weight by weight: of several segments of one regime, the one that needed a weight most counts. A
segment in which nothing was left to learn measures 0 and takes nothing away; one that learns the same again adds
nothing. b bounds what one regime can contribute, whatever was measured: moving every weight by sqrt(xi) costs at most
lambda x 1 nat per token in L_reg because of it.

A regime that goes on or returns is held by the others' importance only. Importance is the same for all of the rank
(`signal_integral`, eq. 4), so each regime takes 1 / R of the adapter's size.
"""
# Shape suffixes: H heads, K experts a head, S slice or O out features.

from collections.abc import Mapping

import torch
from torch import Tensor

from streamlearn.consolidate.importance_store import bank_of, expanded

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
