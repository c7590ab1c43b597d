"""The experts that the records of a forward pass may use: the layer computes no others.

A bias of -MARGIN excludes an expert from a regime: no native logit makes up for it. The experts that are excluded from
all regimes of a pass would be computed only to be multiplied by zero. So the cost of a pass does not grow with the
number of experts, but with how many experts its records share among them.
"""
# Shape suffixes: H heads, K experts a head, N regimes, U experts a head that are computed.

import torch
from torch import Tensor

MARGIN = 100.0
"""Bias against an excluded expert, in logits; native logits of this size would mean that the router diverged."""


class UsableExperts:
    """Finds the usable experts from one layer's CP bias, and keeps what it found until the bias changes."""

    def __init__(self) -> None:
        self._storage: torch.UntypedStorage | None = None
        """Memory of the bias that was read; held, so that no other bias can get its address."""
        self._version = -1
        self._allowed_HKN = torch.zeros(0)
        """On the CPU."""
        self._found: dict[tuple[int, ...], Tensor | None] = {}

    def of(self, bias_HKN: Tensor, slots: tuple[int, ...], at_least: int) -> Tensor | None:
        """Return the indices (H, U) of the experts to compute, ascending; None: all.

        Heads have equally many: a head with fewer usable experts gets excluded ones as well. Where a head has fewer
        than are selected, all are computed, since any expert may be selected then.

        Args:
            bias_HKN: CP biases.
            slots: Distinct regime slots of the pass.
            at_least: Number of experts that are selected for each head of a token.
        """
        storage = bias_HKN.untyped_storage()
        if (
            self._storage is None
            or storage.data_ptr() != self._storage.data_ptr()
            or self._version != bias_HKN._version
        ):
            self._storage, self._version = storage, bias_HKN._version
            self._allowed_HKN, self._found = (bias_HKN.detach() > -MARGIN / 2).cpu(), {}
        if slots not in self._found:
            self._found[slots] = self._find(slots, at_least, bias_HKN.device)
        return self._found[slots]

    def _find(self, slots: tuple[int, ...], at_least: int, device: torch.device) -> Tensor | None:
        allowed_HK = self._allowed_HKN[:, :, list(slots)].any(2)
        counts_H = allowed_HK.sum(1)
        usable = int(counts_H.max())
        if usable == allowed_HK.shape[1] or int(counts_H.min()) < at_least:
            return None
        first_HU = allowed_HK.int().sort(dim=1, descending=True, stable=True).indices[:, :usable]
        return first_HU.sort(dim=1).values.to(device)


def take(values_HK: Tensor, usable_HU: Tensor | None) -> Tensor:
    """Return the usable experts' part (H, U, ...) of a tensor with leading dimensions (H, K)."""
    return values_HK if usable_HU is None else values_HK[rows(usable_HU), usable_HU]


def rows(usable_HU: Tensor) -> Tensor:
    """Return the heads' indices (H, 1), to index with beside `usable_HU`."""
    return torch.arange(len(usable_HU), device=usable_HU.device)[:, None]
