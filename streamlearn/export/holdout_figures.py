"""What an exported regime is worth on its hold-out records, and how far it is from the daemon's own."""
# Shape suffixes: L learned tokens, V vocabulary.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from streamlearn.adapters.routing_context import routing_context
from streamlearn.adapters.sequences import NO_REGIME
from streamlearn.export.plain_lora import PlainLora
from streamlearn.export.plain_lora_adapter import PlainLoraAdapter
from streamlearn.learner.evaluation import groups
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import packed_logits
from streamlearn.learner.packing import PackedBatch, pack
from streamlearn.stream.decode import Example

Logits = Callable[[Sequence[Example]], tuple[PackedBatch, Tensor]]
"""Packs examples and returns the logits (L, V) that predict their learned tokens."""


@dataclass(frozen=True)
class HoldoutFigures:
    """Means over the learned tokens of a regime's hold-out records."""

    records: int
    tokens: int
    loss: float
    """Of what was exported, nats per token."""
    accuracy: float
    daemon_loss: float
    daemon_accuracy: float
    backbone_loss: float
    """Of the untouched backbone."""
    backbone_accuracy: float
    divergence: float
    """KL divergence of what was exported from the daemon's answer, nats per token."""
    largest_difference: float
    """Of a logit, from the daemon's."""


class DaemonModel:
    """The daemon's model: under the adapter of a regime, untouched, or with a plain LoRA beside the backbone."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def adapted(self, slot: int) -> Logits:
        """The logits under the regime in `slot`; `NO_REGIME` is the untouched backbone."""
        return lambda examples: self._logits(examples, slot, None)

    def with_lora(self, lora: PlainLora) -> Logits:
        """The logits of the backbone with a plain LoRA, whose matrices are not copied."""
        return lambda examples: self._logits(examples, NO_REGIME, PlainLoraAdapter(lora))

    def _logits(
        self, examples: Sequence[Example], slot: int, lora: PlainLoraAdapter | None
    ) -> tuple[PackedBatch, Tensor]:
        model = self._learner.model
        packed = pack(examples, self._learner.device, [slot] * len(examples))
        context = packed.context()
        context.parallel_adapter = lora
        with torch.no_grad(), routing_context(model, context):
            return packed, packed_logits(model.get_base_model(), packed)


def measure(
    examples: Sequence[Example], daemon: Logits, backbone: Logits, exported: Logits, *, pack_tokens: int
) -> HoldoutFigures:
    """Score the records, of which there is at least one, three times, group by group."""
    sums = torch.zeros(8, dtype=torch.float64)
    largest = 0.0
    for indices in groups(examples, pack_tokens):
        group = [examples[i] for i in indices]
        packed, exported_LV = exported(group)
        daemon_LV, backbone_LV = daemon(group)[1], backbone(group)[1]
        divergence_L = (
            F.kl_div(exported_LV.log_softmax(-1), daemon_LV.log_softmax(-1), reduction="none", log_target=True)
            .sum(-1)
            .clamp_min(0.0)
        )  # rounding alone may give less
        scores = [figure for each in (exported_LV, daemon_LV, backbone_LV) for figure in _scores(each, packed)]
        sums += torch.tensor([*scores, float(divergence_L.sum()), len(divergence_L)], dtype=torch.float64)
        largest = max(largest, float((exported_LV - daemon_LV).abs().max()))
    tokens = int(sums[-1])
    loss, accuracy, daemon_loss, daemon_accuracy, backbone_loss, backbone_accuracy, divergence = sums[:-1] / tokens
    return HoldoutFigures(
        records=len(examples),
        tokens=tokens,
        loss=float(loss),
        accuracy=float(accuracy),
        daemon_loss=float(daemon_loss),
        daemon_accuracy=float(daemon_accuracy),
        backbone_loss=float(backbone_loss),
        backbone_accuracy=float(backbone_accuracy),
        divergence=float(divergence),
        largest_difference=largest,
    )


def _scores(logits_LV: Tensor, packed: PackedBatch) -> tuple[float, int]:
    """Summed loss, and number of tokens that were the most probable."""
    loss = F.cross_entropy(logits_LV, packed.target_L, reduction="sum")
    return float(loss), int((logits_LV.argmax(-1) == packed.target_L).sum())
