"""Terms that keep a router from sending everything to one expert, and MoT's three stages of training.

Load balance, CP-MoE (arXiv 2605.20247) eq. 12:

    L_aux = sum_i f_i P_i,   f_i fraction of the tokens routed to expert i,  P_i = mean_t softmax(a_t)_i    (1)

P is computed from the native logits a, without the CP bias: the bias steers the selection and leaves the balancing
gradient alone. f is a count and has no gradient. Each head has its own router; the loss is the mean over the heads.

Localized balance, LoRAMoE (arXiv 2312.09979) eq. 6-9:

    Q_nm = sum_j G(x_j)_n             the gates of expert n over the tokens j of sample m, at temperature tau (2)
    I_nm = 1 + delta if expert n and sample m have the same type, else 1 - delta                            (3)
    L_lbc = var(Z) / mean(Z),  Z = I * Q,  over all experts and samples                                     (4)

The first half of the bank has type 0, the second half type 1. `var` is sigma^2, the mean squared deviation. (2) is a
sum, so longer samples weigh more and (4) grows with the length of the samples. The paper intends (4) to route a sample
to the experts of its own type. As printed it does the opposite: (4) is smallest when Z is uniform, that is when the
gates are proportional to 1 / I, and 1 / I is smaller for the sample's own type. A negative delta gives the intended
behavior.

Stages, Mixture-of-Transformers (MoT) Algorithm 1 with eq. 8, 9 and 10:

    stage I, steps 1..T1        MLP experts only, each gradient divided by its Frobenius norm               (5)
    stage II, steps T1+1..T2    attention experts only, plain gradients                                     (6)
    stage III, from T2+1 on     MLP experts only, plain gradients                                           (7)

Routers are trained in all stages. The paper takes a gradient step along (5). Here AdamW receives (5) and rescales it,
so normalizing affects the weighting between steps and not the step size.
"""
# Shape suffixes: T tokens, P tokens of one adapter, B records of the batch, H heads, K experts a head, M samples.

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from streamlearn.adapters.context import AdaptedLayer, RoutingDecision
from streamlearn.adapters.presets import ATTENTION_LINEARS
from streamlearn.learner.loss import PackedBatch
from streamlearn.learner.optimizer import Group
from streamlearn.settings import LearnerSettings

NO_TYPE = -1
"""The type of a sample without one; eq. (4) leaves it out."""


def load_balance(a_HKT: Tensor, selected_HKT: Tensor) -> Tensor:
    """Compute eq. (1), a scalar: k / K under top-k when the load is uniform, 1 when one expert gets everything.

    Args:
        a_HKT: Native logits, without the CP bias.
        selected_HKT: Bool mask of the selected experts, from biased or unbiased logits.
    """
    f_HK = selected_HKT.mean(-1, dtype=a_HKT.dtype)
    P_HK = a_HKT.softmax(1).mean(-1)
    return (f_HK * P_HK).sum(1).mean()


def localized_balance(gate_HKT: Tensor, sample_T: Tensor, type_M: Tensor, *, delta: float = 0.1) -> Tensor:
    """Compute eq. (4), averaged over the heads: a scalar, zero if no sample has a type.

    Args:
        gate_HKT: Gates, zero where an expert is not selected.
        sample_T: Index of the sample that each token belongs to.
        type_M: 0, 1 or `NO_TYPE` for each sample. A typed sample without tokens counts with Q = 0; if all are, so is
            the loss.
        delta: Strength of the type match in eq. (3).
    """
    H, K, _ = gate_HKT.shape
    typed_M = type_M != NO_TYPE
    if not typed_M.any():
        return gate_HKT.new_zeros(())
    Q_HKM = gate_HKT.new_zeros(H, K, len(type_M)).index_add(2, sample_T, gate_HKT)[:, :, typed_M]
    expert_type_K = (torch.arange(K, device=type_M.device) >= K // 2).to(type_M.dtype)
    I_KM = torch.where(expert_type_K[:, None] == type_M[typed_M], 1 + delta, 1 - delta)
    Z_HKM = I_KM.to(Q_HKM.dtype) * Q_HKM
    mean_H = Z_HKM.mean((1, 2)).clamp_min(torch.finfo(Z_HKM.dtype).tiny)
    return (Z_HKM.var((1, 2), correction=0) / mean_H).mean()


class LoadBalance:
    """gamma * L_aux, averaged over the layers; where regimes have their own adapters, over those of the pass too."""

    def __init__(self, strength: float) -> None:
        self._strength = strength
        self._terms: list[Tensor] = []

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        del layer
        self._terms.append(load_balance(decision.native_HKT, decision.selected_HKT))

    def loss(self) -> Tensor:
        return self._strength * torch.stack(self._terms).mean()


class LocalizedBalance:
    """beta * L_lbc, averaged as `LoadBalance` is; records without a type are left out.

    Where a decision is about some of the tokens, the records that have none of them are left out of its term.
    """

    def __init__(
        self, strength: float, packed: PackedBatch, types: Sequence[str | None], settings: LearnerSettings
    ) -> None:
        self._strength = strength
        self._packed = packed
        self._settings = settings
        names = settings.sample_types
        numbers = [names.index(name) if name in names else NO_TYPE for name in types]
        self._type_B = torch.tensor(numbers, device=packed.prompt_T.device)
        self._terms: list[Tensor] = []

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        num = decision.gate_HKT.shape[-1] if decision.num is None else decision.num
        segment_ids_P, type_B = self._packed.sequences.segment_ids(num, is_vision=layer.is_vision), self._type_B
        if decision.tokens_T is not None:
            segment_ids_P = segment_ids_P[decision.tokens_T]
            type_B = torch.full_like(type_B, NO_TYPE).index_copy(0, segment_ids_P, type_B[segment_ids_P])
        tau, delta = self._settings.localized_tau, self._settings.localized_delta
        gate_HKT = decision.gate_HKT
        if tau != 1:
            gate_HKT = (decision.native_HKT / tau).softmax(1) * decision.selected_HKT
        self._terms.append(localized_balance(gate_HKT, segment_ids_P, type_B, delta=delta))

    def loss(self) -> Tensor:
        return self._strength * torch.stack(self._terms).mean()


class Stage(StrEnum):
    """One of the three stages."""

    FFN = "ffn"
    ATTENTION = "attention"
    FINE_TUNING = "fine_tuning"


@dataclass
class Stages:
    """The schedule of stages. It starts again at every shift: a new regime is a new mixture to specialize on."""

    settings: LearnerSettings
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

        Gradients of experts that the stage does not train are set to None. Stage I replaces the others by new,
        normalized tensors, so whoever holds the old ones still reads the plain gradients.

        Args:
            groups: All groups of the optimizer.
            experts: Names of the groups that contain experts; the others are routers, trained in every stage.
        """
        stage = self.stage
        for group in groups:
            if group.name not in experts:
                continue
            is_frozen = (group.name.rpartition(".")[2] in ATTENTION_LINEARS) != (stage is Stage.ATTENTION)
            for parameter in group.parameters.values():
                if is_frozen:
                    parameter.grad = None
                elif stage is Stage.FFN and parameter.grad is not None:
                    over = tuple(range(2, parameter.grad.ndim))
                    norm_HK = parameter.grad.norm(dim=over, keepdim=True)
                    parameter.grad = parameter.grad / norm_HK.clamp_min(1e-12)  # zero for an expert without tokens
        self.steps += 1
