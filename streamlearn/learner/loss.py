"""Next-token loss over a packed batch, in nats per learned token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from streamlearn.adapters.context import RoutingContext, RoutingHook, Sequences, Slot
from streamlearn.backbone.attention import Records
from streamlearn.backbone.checks import gathered, hidden_states, plain_head
from streamlearn.stream.record import IGNORED, Example, Prompt, RecordImage

# Packing: the records of a batch in one sequence, without padding.
#
# Records are concatenated and positions restart at 0 in each. The logits of token t - 1 predict token t, so a label at
# position t is learned from the hidden state at t - 1; only those hidden states go through the vocabulary projection.

# Shape suffixes: T tokens of all records, L learned tokens, B records.


@dataclass(frozen=True)
class PackedBatch:
    """Tensors of packed records; the leading dimension is 1 where the model expects a batch."""

    input_ids: Tensor
    """(1, T) token ids."""
    position_ids: Tensor
    """(1, T), from 0 in each record; (P, 1, T) if the backbone gives each token P coordinates."""
    records: Records
    """Lengths of the records, for attention."""
    predictor_L: Tensor
    """Indices in T of the tokens whose next token is learned."""
    target_L: Tensor
    """Ids of those next tokens."""
    segment_ids_L: Tensor
    """Index of the record that each target belongs to; ascending."""
    learned_B: Tensor
    """Number of targets of each record."""
    prompt_T: Tensor
    """Bool, whether a token precedes the first learned one of its record."""
    sequences: Sequences
    """Lengths and adapters of the records."""
    features: Mapping[str, Tensor]
    """Image features by name of the forward pass's argument; empty without images."""

    def context(self, *, explore: bool = False, hooks: tuple[RoutingHook, ...] = ()) -> RoutingContext:
        """Build the routing context of a forward pass over these records."""
        return RoutingContext(self.sequences, self.prompt_T, explore=explore, hooks=hooks)


def pack(examples: Sequence[Example], device: torch.device, slots: Sequence[Slot] | None = None) -> PackedBatch:
    """Pack at least one example on `device`; `slots` are the adapters of the examples."""
    lengths = [len(example.input_ids) for example in examples]
    labels_T = np.concatenate([example.labels for example in examples])
    segment_ids_T = np.repeat(np.arange(len(examples)), lengths)
    positions_T = np.concatenate([np.arange(length) for length in lengths])
    images = [image for example in examples for image in example.images]
    prompts_B = np.array([example.prompt_length for example in examples])
    labelled_L = np.flatnonzero((labels_T != IGNORED) & (positions_T > 0))

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    return PackedBatch(
        input_ids=tensor(np.concatenate([example.input_ids for example in examples]))[None],
        position_ids=tensor(positions(examples)),
        records=Records(lengths),
        predictor_L=tensor(labelled_L - 1),
        target_L=tensor(labels_T[labelled_L]),
        segment_ids_L=tensor(segment_ids_T[labelled_L]),
        learned_B=tensor(np.bincount(segment_ids_T[labelled_L], minlength=len(examples))),
        prompt_T=tensor(positions_T < np.maximum(prompts_B, 1)[segment_ids_T], torch.bool),
        sequences=Sequences(
            lengths=tuple(lengths),
            slots=None if slots is None else tuple(slots),
            vision_units=vision_units([example.images for example in examples]),
            device=device,
        ),
        features=joined_features(images, device),
    )


def positions(examples: Sequence[Example | Prompt]) -> NDArray[np.int64]:
    """Concatenate the positions of all: (1, T), or (P, 1, T) if one of them has P coordinates per token."""
    own = [np.arange(len(e))[None] if e.positions is None else e.positions for e in examples]
    most = max(map(len, own))
    packed: NDArray[np.int64] = np.concatenate([np.broadcast_to(p, (most, p.shape[1])) for p in own], axis=1)
    return packed[:, None] if most > 1 else packed


def vision_units(images_B: Sequence[Sequence[RecordImage]]) -> tuple[int, ...] | None:
    """Sum the vision units of each record, see `Sequences`; None without images."""
    return tuple(sum(image.extent for image in images) for images in images_B) if any(images_B) else None


def joined_features(images: Sequence[RecordImage], device: torch.device) -> dict[str, Tensor]:
    """Concatenate the features of all images along each feature's own axis, as one forward pass expects them."""
    if not images:
        return {}
    features = {
        name: np.concatenate([image.inputs.features[name] for image in images], axis=axis)
        for name, axis in images[0].axes.items()
    }
    return {name: torch.from_numpy(feature).to(device) for name, feature in features.items()}


# Cross-entropy over a vocabulary from hidden states, in chunks of tokens: no tensor has the logits of all tokens.
#
#     l_t = log sum_v exp(w_v h_t) - w_(y_t) h_t                                                  (1)
#     dl_t / dh_t = sum_v (softmax(W h_t)_v - [v = y_t]) w_v                                      (2)
#
# W is frozen, so (2) is all that the backward pass needs, and it is computed with (1), while a chunk's logits are
# there. At 8 x 2048 tokens and a vocabulary of 151,936, float32 logits and their gradient would take 20 GB.

# Shape suffixes: L tokens, C those of a chunk, D hidden size, V vocabulary.


CPU_LOGITS, GPU_LOGITS = 2**24, 2**26
"""Logits of a chunk: 64 MB in float32 on a CPU, 256 MB elsewhere, where larger products are faster."""


def vocabulary_loss(hidden_LD: Tensor, head: nn.Linear, target_L: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eq. (1) in float32, and whether each target was the most probable token.

    Args:
        hidden_LD: Hidden states that predict the targets.
        head: The frozen linear that makes the logits; of one that is divided among processes, the weight is gathered.
        target_L: Ids of the next tokens.

    Returns:
        Losses (L,), part of the autograd graph, nats; and bool (L,).
    """
    loss_L, correct_L = _VocabularyLoss.apply(hidden_LD, head, target_L)  # type: ignore[no-untyped-call]
    return loss_L, correct_L


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_LD: Tensor, head: nn.Linear, target_L: Tensor) -> tuple[Tensor, Tensor]:
        loss_L = torch.empty(len(hidden_LD), dtype=torch.float32, device=hidden_LD.device)
        correct_L = torch.empty_like(target_L, dtype=torch.bool)
        gradient_LD = torch.empty_like(hidden_LD) if ctx.needs_input_grad[0] else None
        logits = CPU_LOGITS if hidden_LD.device.type == "cpu" else GPU_LOGITS
        size = max(1, logits // len(head.weight))
        for start in range(0, len(hidden_LD), size):
            chunk = slice(start, start + size)
            target_C1 = target_L[chunk, None]
            logits_CV = F.linear(hidden_LD[chunk], head.weight, head.bias).float()
            correct_L[chunk] = logits_CV.argmax(-1) == target_L[chunk]
            normalizer_C1 = logits_CV.logsumexp(-1, keepdim=True)
            loss_L[chunk] = (normalizer_C1 - logits_CV.gather(1, target_C1))[:, 0]
            if gradient_LD is not None:
                softmax_CV = logits_CV.sub_(normalizer_C1).exp_()
                softmax_CV.scatter_add_(1, target_C1, torch.full_like(target_C1, -1.0, dtype=torch.float32))
                torch.mm(softmax_CV.to(head.weight.dtype), head.weight, out=gradient_LD[chunk])
        ctx.save_for_backward(gradient_LD)
        ctx.mark_non_differentiable(correct_L)
        return loss_L, correct_L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss_L: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient_LD,) = ctx.saved_tensors
        return (gradient_LD * d_loss_L[:, None]).to(gradient_LD.dtype), None, None


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
    return {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "records": packed.records,
        "use_cache": False,
        **arguments(model, packed.features),
    }
