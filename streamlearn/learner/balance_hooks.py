"""Routing hooks that compute the auxiliary losses of a training pass, one term per layer.

Where regimes have adapters of their own, a layer has a term for each adapter of the pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamlearn.adapters.balance import NO_TYPE, load_balance, localized_balance
from streamlearn.adapters.routing_context import AdaptedLayer, RoutingDecision
from streamlearn.learner.packing import PackedBatch


class LoadBalance:
    """gamma * L_aux (CP-MoE eq. 12 and 15), averaged over the layers."""

    def __init__(self, strength: float) -> None:
        self._strength = strength
        self._terms: list[Tensor] = []

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        """Add the term of one layer."""
        del layer
        self._terms.append(load_balance(decision.native_HKT, decision.selected_HKT))

    def loss(self) -> Tensor:
        """Return the term of the objective, a scalar; needs at least one layer."""
        return self._strength * torch.stack(self._terms).mean()


class LocalizedBalance:
    """beta * L_lbc (LoRAMoE eq. 8 and 9), averaged over the layers; records without a type are left out.

    Tokens are routed, not whole sequences. Where a decision is about some tokens only, so is its term: records that
    have none of them are left out.
    """

    def __init__(
        self, strength: float, packed: PackedBatch, types: Sequence[str | None], names: tuple[str, str]
    ) -> None:
        self._strength = strength
        self._packed = packed
        numbers = [names.index(each) if each in names else NO_TYPE for each in types]
        self._type_B = torch.tensor(numbers, device=packed.prompt_T.device)
        self._terms: list[Tensor] = []

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        """Add the term of one layer."""
        num = decision.gate_HKT.shape[-1] if decision.num is None else decision.num
        segment_ids_P, type_B = self._packed.sequences.segment_ids(num, is_vision=layer.is_vision), self._type_B
        if decision.tokens_T is not None:
            segment_ids_P = segment_ids_P[decision.tokens_T]
            type_B = torch.full_like(type_B, NO_TYPE).index_copy(0, segment_ids_P, type_B[segment_ids_P])
        self._terms.append(localized_balance(decision.gate_HKT, segment_ids_P, type_B))

    def loss(self) -> Tensor:
        """Return the term of the objective, a scalar; needs at least one layer."""
        return self._strength * torch.stack(self._terms).mean()
