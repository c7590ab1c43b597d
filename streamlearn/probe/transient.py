"""The transient expert: a bank like the one it probes, beside it, with no effect until it is trained.

    y = W x + experts(x) + (alpha / r) sum_m sum_j B~_mj A~_mj h_m,   B~ = 0 at the start             (1)

CP-MoE (arXiv 2605.20247) section 3.2.1: E(x) = 0 at first, trained with backbone and stable experts frozen (eq. 5).
It has no router: every token passes through all of it. With H x K blocks of the bank's rank it has one block for each
stable expert, so that importance has somewhere to go; a head's blocks together are the head's transient expert.
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


class TransientExpert:
    """One for every bank of a model; a `ParallelAdapter` of the passages that it takes part in."""

    def __init__(self, banks: Sequence[Bank], coordinates: Coordinates, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._banks = {bank.name: bank for bank in banks}
        self.A = {bank.name: nn.Parameter(_first_A(bank, coordinates, generator)) for bank in banks}
        self.B = {bank.name: nn.Parameter(torch.zeros_like(bank.B)) for bank in banks}
        self._cka = {bank.name: GramCka() for bank in banks}
        self.comparing = False
        """Whether passes gather what CKA needs."""

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        """Eq. (1)'s last term, added in place."""
        A_HKRS, B_HKRO = self.A[layer.name], self.B[layer.name]
        if self.comparing:
            self._compare(self._banks[layer.name], x_TD.reshape(-1, x_TD.shape[-1]), A_HKRS)
        return add_experts(y, x_TD, A_HKRS, B_HKRO, None, scaling=layer.scaling)

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name: BANK.A and BANK.B."""
        by_name: dict[str, nn.Parameter] = {}
        for name in self.A:
            by_name |= {f"{name}.A": self.A[name], f"{name}.B": self.B[name]}
        return by_name

    def similarity(self) -> Mapping[str, Tensor]:
        """CKA (eq. 9) of each head's transient expert with each stable one, (H, K) by bank."""
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
    bound = 1 / math.sqrt(bank.A.shape[-1])  # as a fresh expert's
    return torch.empty(bank.A.shape).uniform_(-bound, bound, generator=generator).to(bank.A.device)
