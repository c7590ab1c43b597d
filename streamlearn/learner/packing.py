"""Packing: the records of a batch in one sequence, without padding.

Records are concatenated and positions restart at 0 in each. The logits of token t - 1 predict token t, so a label at
position t is learned from the hidden state at t - 1; only those hidden states go through the vocabulary projection.
"""
# Shape suffixes: T tokens of all records, L learned tokens, B records.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamlearn.adapters.routing_context import RoutingContext, RoutingHook
from streamlearn.adapters.sequences import Sequences, Slot
from streamlearn.backbone.attention import Records
from streamlearn.stream.decode import Example, Prompt
from streamlearn.stream.encode import IGNORED
from streamlearn.stream.images import RecordImage


@dataclass(frozen=True)
class PackedBatch:
    """Tensors of packed records; the leading dimension is 1 where the model expects a batch."""

    input_ids: Tensor
    """(1, T) token ids."""
    position_ids: Tensor
    """(1, T), from 0 in each record; (P, 1, T) if the backbone gives each token P coordinates."""
    records: Records
    """Their lengths, for attention."""
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
    """Where the records lie, and what adapts each."""
    features: Mapping[str, Tensor]
    """Image features by name of the forward pass's argument; empty without images."""

    def context(self, *, explore: bool = False, hooks: tuple[RoutingHook, ...] = ()) -> RoutingContext:
        """Build the routing context of a forward pass over these records."""
        return RoutingContext(self.sequences, self.prompt_T, explore=explore, hooks=hooks)


def pack(examples: Sequence[Example], device: torch.device, slots: Sequence[Slot] | None = None) -> PackedBatch:
    """Pack examples, of which there is at least one, on `device`; `slots` say what adapts each."""
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
    own = [np.arange(len(each))[None] if each.positions is None else each.positions for each in examples]
    most = max(map(len, own))
    packed: NDArray[np.int64] = np.concatenate([np.broadcast_to(each, (most, each.shape[1])) for each in own], axis=1)
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
