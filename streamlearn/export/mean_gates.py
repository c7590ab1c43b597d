"""The mean gate of every expert over the tokens of some records."""
# Shape suffixes: T tokens or sequences, H heads, K experts a head.

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from streamlearn.adapters.model import Bank, banks
from streamlearn.adapters.routing_context import AdaptedLayer, RoutingDecision
from streamlearn.learner.evaluation import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Example


class MeanGates:
    """A routing hook that averages; whole sequences, where those are routed, count once each."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._num: dict[str, int] = {}

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        """Add one layer's decisions in a pass."""
        gate_HKT = decision.gate_HKT.float()
        self._sums[layer.block] = self._sums.get(layer.block, 0.0) + gate_HKT.sum(-1)
        self._num[layer.block] = self._num.get(layer.block, 0) + gate_HKT.shape[-1]

    def of(self, block: str) -> Tensor | None:
        """The mean (H, K) of what shares a router, see `AdaptedLayer.block`; None if nothing was routed there."""
        return self._sums[block] / self._num[block] if self._num.get(block) else None


def mean_gates(
    learner: Learner, adapter: str, slot: int, examples: Sequence[Example], *, pack_tokens: int
) -> Mapping[str, Tensor]:
    """Measure the mean gates (H, K) of an adapter's linears, by name, over the records of the regime in `slot`.

    In a vision tower nothing is routed if no record has an image. Experts there get equal gates: the mean of a router
    that prefers none. An expert that was never trained adds nothing, whatever its gate.
    """
    means = MeanGates()
    slots = [slot] * len(examples)
    run_to_end(score(learner.model, examples, learner.device, pack_tokens=pack_tokens, slots=slots, hooks=(means,)))
    found = {bank.linear: (bank, means.of(bank.info.block)) for bank in banks(learner.model, adapter)}
    return {linear: _equal(bank) if gate_HK is None else gate_HK for linear, (bank, gate_HK) in found.items()}


def _equal(bank: Bank) -> Tensor:
    """Equal gates (H, K) of sum 1 in each head."""
    heads, experts = bank.A.shape[:2]
    return torch.full((heads, experts), 1 / experts)
