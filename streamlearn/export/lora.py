"""A regime's experts as one plain LoRA.

    A = blockdiag(A_1, ..., A_H),  B = [B_1 ... B_H]                                                       (1)

With one expert a head every gate is 1, and y = W x + (alpha / r) B A x is eq. (2) of `adapters.layer`: (1) is exact, of
rank H R. Where tokens choose among K experts, no matrix does the same. The nearest one of this form gives every expert
the same gate for all tokens:

    A_m = [A_m1; ...; A_mK],  B_m = [g_m1 B_m1 ... g_mK B_mK]                                              (2)
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from streamlearn.adapters.context import AdaptedLayer, RoutingDecision
from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.adapters.tuner import Bank, banks
from streamlearn.backbone.lora import LoraMatrices, PlainLora
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.stream.record import Example

# Shape suffixes: T tokens, D in features, O out features, H heads, S = D / H slice, K experts a head, R rank, N = H R.


_PREFIX = "base_model.model."
_A, _B = ".head_lora_A", ".head_lora_B"


def plain_lora(
    weights: Mapping[str, Tensor], config: HeadLoraConfig, gates: Mapping[str, Tensor] | None = None
) -> PlainLora:
    """Build eq. (1), or eq. (2) where tokens choose among experts.

    Args:
        weights: Weights of one adapter, by their names in a PEFT folder.
        config: Options of the adapter.
        gates: g (H, K) of each linear, by its name in the backbone, see `mean_gates`; None with one expert a head.
    """
    assert (gates is None) == (config.num_experts == 1), "where tokens choose among experts, their gates are needed"
    layers: dict[str, LoraMatrices] = {}
    for name, A_HKRS in weights.items():
        if not name.endswith(_A):
            continue
        layer, B_HKRO = name.removesuffix(_A), weights[name.removesuffix(_A) + _B].cpu()
        linear = layer.removeprefix(_PREFIX)
        if gates is not None:
            B_HKRO = B_HKRO * gates[linear].cpu()[:, :, None, None]
        A_ND = torch.block_diag(*A_HKRS.cpu().flatten(1, 2))  # type: ignore[no-untyped-call]
        layers[linear] = LoraMatrices(A_ND, B_HKRO.flatten(0, 2).T.contiguous())
    rank = config.num_heads * config.num_experts * config.r
    return PlainLora(layers, rank, config.scaling * rank)


def expert_weights(lora: PlainLora, config: HeadLoraConfig) -> dict[str, Tensor]:
    """Return the blocks of eq. (1), bit for bit: the inverse of `plain_lora`, with one expert a head."""
    H, R, weights = config.num_heads, config.r, dict[str, Tensor]()
    for linear, matrices in lora.layers.items():
        A_HRHS = matrices.A_ND.view(H, R, H, -1)
        weights[f"{_PREFIX}{linear}{_A}"] = torch.stack([A_HRHS[m, :, m] for m in range(H)])[:, None]
        weights[f"{_PREFIX}{linear}{_B}"] = matrices.B_ON.T.reshape(H, 1, R, -1)
    return weights


class PlainLoraAdapter:
    """Applies a plain LoRA, see `ParallelAdapter`."""

    def __init__(self, lora: PlainLora) -> None:
        self._lora = lora

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        """Add (alpha / rank) B A x in the dtype of `y`."""
        matrices = self._lora.layers[layer.name]
        A_ND, B_ON = matrices.A_ND.to(y), matrices.B_ON.to(y)
        return y + self._lora.scaling * F.linear(F.linear(x_TD.to(y.dtype), A_ND), B_ON)


def mean_gates(
    learner: Learner, adapter: str, slot: int, examples: Sequence[Example], *, pack_tokens: int
) -> Mapping[str, Tensor]:
    """Measure the mean gates (H, K) of an adapter's linears, by name, over the records of the regime in `slot`.

    Where sequences are routed, each counts once. In a vision tower nothing is routed if no record has an image: experts
    there get equal gates, the mean of a router that prefers none. An expert that was never trained adds nothing,
    whatever its gate.
    """
    sums: dict[str, Tensor] = {}  # by what shares a router, see `AdaptedLayer.block`
    num: Counter[str] = Counter()

    def add(layer: AdaptedLayer, decision: RoutingDecision) -> None:
        gate_HKT = decision.gate_HKT.float()
        sums[layer.block] = sums.get(layer.block, 0.0) + gate_HKT.sum(-1)
        num[layer.block] += gate_HKT.shape[-1]

    slots = [slot] * len(examples)
    run_to_end(score(learner.model, examples, learner.device, pack_tokens=pack_tokens, slots=slots, hooks=(add,)))

    def mean(bank: Bank) -> Tensor:
        block = bank.info.block
        return sums[block] / num[block] if num[block] else torch.full(bank.A.shape[:2], 1 / bank.A.shape[1])

    return {bank.linear: mean(bank) for bank in banks(learner.model, adapter)}
