"""Next-token loss over a packed batch, in nats per learned token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from streamlearn.learner.packing import PackedBatch


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
        """Return each record's summed loss and number of learned tokens, (records,) each."""
        sums = torch.zeros(packed.num_records, device=self.token_L.device).index_add_(
            0, packed.segment_ids_L, self.token_L
        )
        return sums, torch.bincount(packed.segment_ids_L, minlength=packed.num_records)


def arguments(model: Any, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cast floating-point image features to the backbone's dtype; sizes and masks are integers and stay."""
    return {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in features.items()}


def packed_logits(model: Any, packed: PackedBatch) -> Tensor:
    """Run one forward pass and return the float32 logits (L, V) that predict the learned tokens."""
    logits_LV: Tensor = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        cu_seq_lens_q=packed.cu_seqlens,
        logits_to_keep=packed.predictor_L,
        use_cache=False,
        **arguments(model, packed.features),
    ).logits[0]
    return logits_LV.float()


def packed_loss(model: Any, packed: PackedBatch) -> PackedLoss:
    """Run one forward pass and compute the loss, in float32."""
    logits_LV = packed_logits(model, packed)
    token_L = F.cross_entropy(logits_LV, packed.target_L, reduction="none")
    correct_L = logits_LV.detach().argmax(dim=-1) == packed.target_L
    return PackedLoss(mean=token_L.mean(), token_L=token_L.detach(), correct_L=correct_L)
