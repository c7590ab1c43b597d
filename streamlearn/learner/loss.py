"""Next-token loss over a packed batch, in nats per learned token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from streamlearn.backbone.output_head import gathered, hidden_states, plain_head
from streamlearn.learner.packing import PackedBatch
from streamlearn.learner.vocabulary_loss import vocabulary_loss


@dataclass(frozen=True)
class PackedLoss:
    """Losses of one packed batch; only `mean` is part of the autograd graph."""

    mean: Tensor
    """Scalar, mean over the learned tokens, nats per token."""
    token_L: Tensor
    """Loss of each learned token, nats, detached."""
    correct_L: Tensor
    """Whether each learned token was the most probable one, bool."""

    def per_record(self, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return each record's summed loss and its number of correct tokens, (B,) each, float32."""
        sums_B = torch.segment_reduce(self.token_L, "sum", lengths=packed.learned_B, unsafe=True)  # in a fixed order
        correct_B = torch.zeros_like(sums_B).index_add_(0, packed.segment_ids_L, self.correct_L.float())
        return sums_B, correct_B


def arguments(model: Any, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cast floating-point image features to the backbone's dtype; sizes and masks are integers and stay."""
    return {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in features.items()}


def packed_logits(model: Any, packed: PackedBatch) -> Tensor:
    """Run one forward pass and return the float32 logits (L, V) that predict the learned tokens."""
    logits_LV: Tensor = model(**_inputs(model, packed), logits_to_keep=packed.predictor_L).logits[0]
    return logits_LV.float()


def packed_loss(model: Any, packed: PackedBatch) -> PackedLoss:
    """Run one forward pass and compute the loss, in float32."""
    head = plain_head(model)
    if head is None:
        logits_LV = packed_logits(model, packed)
        token_L = F.cross_entropy(logits_LV, packed.target_L, reduction="none")
        correct_L = logits_LV.detach().argmax(dim=-1) == packed.target_L
    else:
        hidden_LD = hidden_states(model, **_inputs(model, packed))[0, packed.predictor_L]
        with gathered(head):
            token_L, correct_L = vocabulary_loss(hidden_LD, head, packed.target_L)
    return PackedLoss(mean=token_L.mean(), token_L=token_L.detach(), correct_L=correct_L)


def _inputs(model: Any, packed: PackedBatch) -> dict[str, Any]:
    """Arguments of a forward pass."""
    return {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "records": packed.records,
        "use_cache": False,
        **arguments(model, packed.features),
    }
