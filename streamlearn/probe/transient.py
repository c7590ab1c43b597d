"""The transient expert: a parallel adapter of the same shape as the experts, with zero output until it is trained.

    y = W x + experts(x) + (alpha / r) sum_m sum_j B~_mj A~_mj h_m,   B~ = 0 at the start             (1)

CP-MoE (arXiv 2605.20247) section 3.2.1: E(x) = 0 at first, trained with backbone and stable experts frozen (eq. 5).
There is no router: every token passes through all blocks. There are H x K blocks of the bank's rank, one for each
stable expert, so that importance can be carried over block by block; the blocks of a head are its transient expert.
"""
# Shape suffixes: T tokens, D in features, O out features, H heads, S = D / H slice, K experts a head, R rank, N = K R.

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from streamlearn.adapters.bottleneck import add_experts, split_heads
from streamlearn.adapters.model import Bank
from streamlearn.adapters.routing_context import AdaptedLayer
from streamlearn.probe.cka import GramCka

Coordinates = Literal["bank", "random", "invariant"]
"""Initialization of A: `bank` copies the bank's A, the others are random; `invariant` also averages importance over the
rank."""


class TransientExpert:
    """Transient experts of all banks of a model; a `ParallelAdapter`."""

    def __init__(self, banks: Sequence[Bank], coordinates: Coordinates, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._banks = {bank.name: bank for bank in banks}
        self.A = {bank.name: nn.Parameter(_first_A(bank, coordinates, generator)) for bank in banks}
        self.B = {bank.name: nn.Parameter(torch.zeros_like(bank.B)) for bank in banks}
        self._cka = {bank.name: GramCka() for bank in banks}
        self.comparing = False
        """Whether forward passes also accumulate the moments for CKA."""

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        """Add the last term of eq. (1) to `y` (..., O) in place."""
        A_HKRS, B_HKRO = self.A[layer.name], self.B[layer.name]
        if self.comparing:
            self._compare(self._banks[layer.name], x_TD.reshape(-1, x_TD.shape[-1]), A_HKRS)
        return add_experts(y, x_TD, A_HKRS, B_HKRO, None, scaling=layer.scaling)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name: `BANK.A` and `BANK.B`."""
        by_name: dict[str, nn.Parameter] = {}
        for name in self.A:
            by_name |= {f"{name}.A": self.A[name], f"{name}.B": self.B[name]}
        return by_name

    def similarity(self) -> Mapping[str, Tensor]:
        """Compute CKA (eq. 9) of each head's transient expert with each stable expert, (H, K) by bank."""
        return {
            bank.name: self._cka[bank.name].score(self.B[bank.name].flatten(1, 2), bank.B)
            for bank in self._banks.values()
        }

    def _compare(self, bank: Bank, x_TD: Tensor, A_HKRS: Tensor) -> None:
        H = len(A_HKRS)
        h_HST = split_heads(x_TD.float(), H).mT
        te_HNT = torch.bmm(A_HKRS.flatten(1, 2), h_HST)
        se_HKRT = torch.bmm(bank.A.flatten(1, 2), h_HST).view(*bank.A.shape[:3], -1)
        self._cka[bank.name].add(te_HNT, se_HKRT)


def _first_A(  # noqa: N802
    bank: Bank, coordinates: Coordinates, generator: torch.Generator
) -> Tensor:
    if coordinates == "bank":
        return bank.A.detach().clone()
    bound = 1 / math.sqrt(bank.A.shape[-1])  # as for a new expert
    return torch.empty(bank.A.shape).uniform_(-bound, bound, generator=generator).to(bank.A.device)
