"""Which experts the tokens of each regime were given in training, counted since this process began."""
# Shape suffixes: N regimes, L linears, H heads, K experts a head.

from collections import defaultdict
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
        self._tokens_LHK: dict[int, Tensor] = {}
        self._read: dict[int, tuple[Table, Table | None]] = {}
        """What `read` returned, while nothing is added."""

    def add(self, banks: Sequence[Bank], slots: Sequence[int] | None) -> None:
        """Count an update of these banks on a batch of these regimes.

        Of experts that regimes share, a batch of several regimes is left out: their tokens were counted together.
        """
        only = slots[0] if slots and len(set(slots)) == 1 else None
        loads: dict[int, list[Tensor]] = defaultdict(list)
        for bank in banks:
            if bank.load_HK is None:
                continue
            slot = only if bank.adapter == SHARED else slot_of(bank.adapter)
            if slot is not None:
                loads[slot].append(bank.load_HK)
        for slot, own in loads.items():
            self._tokens_LHK[slot] = self._tokens_LHK.get(slot, 0) + torch.stack(own)
            self._read.pop(slot, None)

    def drop(self, slot: int) -> None:
        """Forget a regime."""
        self._tokens_LHK.pop(slot, None)
        self._read.pop(slot, None)

    def read(self, slot: int, banks: Sequence[Bank]) -> tuple[Table, Table | None] | None:
        """Of each head its experts, the busiest first: means over linears. None before an update of the regime.

        `banks` are those of experts that regimes share, if they do.

        1. Share of the head's tokens that the expert was given, 0 to 1.
        2. Its routing bias for the regime (CP-MoE eq. 10); None without biases.
        """
        if slot not in self._tokens_LHK:
            return None
        if slot not in self._read:
            tokens_LHK, order_LHK = self._tokens_LHK[slot].float().sort(2, descending=True)
            shares_LHK = tokens_LHK / tokens_LHK.sum(2, keepdim=True).clamp_min(1)
            biases = [bank.bias_HKN[:, :, slot] for bank in banks if bank.bias_HKN is not None]
            bias_LHK = torch.stack(biases).gather(2, order_LHK) if biases else None
            self._read[slot] = (_table(shares_LHK), None if bias_LHK is None else _table(bias_LHK))
        return self._read[slot]

    def effective_regimes(self) -> float | None:
        """Effective number of regimes of an expert that they share (MH-MoE eq. 7 to 9, the regime as the feature).

        exp of the entropy of the regime given the expert, mean over experts weighted by their tokens: 1 where every
        expert has a regime of its own, the number of regimes where all use it alike. None before an update.
        """
        if not self._tokens_LHK:
            return None
        tokens_NLHK = torch.stack(list(self._tokens_LHK.values())).float()
        total_LHK = tokens_NLHK.sum(0)
        number_LHK = torch.special.entr(tokens_NLHK / total_LHK.clamp_min(1)).sum(0).exp()
        return round(float((total_LHK * number_LHK).sum() / total_LHK.sum()), 4)


def _table(values_LHK: Tensor) -> Table:
    return tuple(tuple(round(value, 4) for value in row) for row in values_LHK.mean(0).tolist())
