"""Routing hooks that compute the auxiliary losses of a training pass, one term per layer.

Where regimes have adapters of their own, a layer has a term for each adapter of the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from streamlearn.adapters.balance import NO_TYPE, load_balance, localized_balance
from streamlearn.adapters.context import AdaptedLayer, RoutingDecision
from streamlearn.learner.loss import PackedBatch
from streamlearn.learner.optimizer import Group
from streamlearn.settings import LearnerSettings


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


# MoT's three training stages: which experts are trained in a step, and with what gradient.
#
#     stage I, steps 1..T1        MLP experts only, each gradient divided by its Frobenius norm            (1)
#     stage II, steps T1+1..T2    attention experts only, plain gradients                                  (2)
#     stage III, from T2+1 on     MLP experts only, plain gradients                                        (3)
#
# Mixture-of-Transformers, Algorithm 1 with eq. 8, 9 and 10; routers are trained in all stages. The paper takes a
# gradient
# step along (1); here (1) is passed to AdamW, which rescales it, so the normalization affects the weighting between
# steps and not the step size. Stages restart at every shift: a new regime is a new mixture to specialize on.


class Stage(StrEnum):
    """One of the three stages."""

    FFN = "ffn"
    ATTENTION = "attention"
    FINE_TUNING = "fine_tuning"


@dataclass
class Stages:
    """The schedule of stages. `attention` names the banks of attention linears."""

    settings: LearnerSettings
    attention: frozenset[str]
    steps: int = 0
    """Updates since the last shift."""

    @property
    def stage(self) -> Stage:
        """Stage of the next update."""
        if self.steps < self.settings.ffn_steps:
            return Stage.FFN
        if self.steps < self.settings.ffn_steps + self.settings.attention_steps:
            return Stage.ATTENTION
        return Stage.FINE_TUNING

    def apply(self, groups: Sequence[Group], experts: frozenset[str]) -> None:
        """Apply the current stage to the gradients of one update and advance the schedule.

        Gradients of experts that the stage does not train are set to None; stage I replaces those of the others by
        normalized ones, in memory of their own: whoever has the tensors from before still reads the plain gradients.

        Args:
            groups: All groups of the optimizer.
            experts: Names of the groups that contain experts; the others are routers, trained in every stage.
        """
        stage = self.stage
        for group in groups:
            if group.name not in experts:
                continue
            frozen = (group.name in self.attention) != (stage is Stage.ATTENTION)
            for parameter in group.parameters.values():
                if frozen:
                    parameter.grad = None
                elif stage is Stage.FFN and parameter.grad is not None:
                    over = tuple(range(2, parameter.grad.ndim))
                    norm_HK = parameter.grad.norm(dim=over, keepdim=True)
                    parameter.grad = parameter.grad / norm_HK.clamp_min(1e-12)  # zero for an expert without tokens
        self.steps += 1

    def restart(self) -> None:
        """Start again with stage I: a shift."""
        self.steps = 0
