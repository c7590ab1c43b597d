"""Which experts the tokens of each regime were given in training, counted since this process began."""
# Shape suffixes: L linears, H heads, K experts a head, N regime slots.

from collections.abc import Sequence

import torch
from torch import Tensor

from streamlearn.adapters.presets import slot_of
from streamlearn.adapters.tuner import SHARED, Bank

Table = tuple[tuple[float, ...], ...]
"""A row a head, a column one of its experts."""


class ExpertUsage:
    """Counts by regime slot. Not part of a snapshot."""

    def __init__(self) -> None:
        self._tokens: dict[int, dict[str, Tensor]] = {}
        """(H, K) of each linear, by slot."""
        self._read: dict[int, tuple[Table, Table | None]] = {}
        """What `read` returned, while nothing is added."""

    def add(self, banks: Sequence[Bank], slots: Sequence[int] | None) -> None:
        """Count an update of these banks on a batch of these regimes.

        Of experts that regimes share, a batch of several regimes is left out: their tokens were counted together.
        """
        only = slots[0] if slots and len(set(slots)) == 1 else None
        for bank in banks:
            slot = only if bank.adapter == SHARED else slot_of(bank.adapter)
            if slot is None or bank.load_HK is None:
                continue
            counted = self._tokens.setdefault(slot, {})
            counted[bank.linear] = counted.get(bank.linear, 0) + bank.load_HK  # a new tensor: the load is reset
            self._read.pop(slot, None)

    def drop(self, slot: int) -> None:
        """Forget a regime."""
        self._tokens.pop(slot, None)
        self._read.pop(slot, None)

    def read(self, slot: int, banks: Sequence[Bank]) -> tuple[Table, Table | None] | None:
        """Of each head its experts, the busiest first: means over linears. None before an update of the regime.

        1. Share of the head's tokens that the expert was given, 0 to 1.
        2. Its routing bias for the regime (CP-MoE eq. 10); None without biases.
        """
        counted = self._tokens.get(slot)
        if counted is None:
            return None
        if slot not in self._read:
            tokens_LHK, order_LHK = torch.stack(list(counted.values())).float().sort(2, descending=True)
            shares_LHK = tokens_LHK / tokens_LHK.sum(2, keepdim=True).clamp_min(1)
            biases = {bank.linear: bank.bias_HKN[:, :, slot] for bank in banks if bank.bias_HKN is not None}
            bias_LHK = torch.stack([biases[linear] for linear in counted]).gather(2, order_LHK) if biases else None
            self._read[slot] = (_table(shares_LHK), None if bias_LHK is None else _table(bias_LHK))
        return self._read[slot]


def _table(values_LHK: Tensor) -> Table:
    return tuple(tuple(round(value, 4) for value in row) for row in values_LHK.mean(0).tolist())
