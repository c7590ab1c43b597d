"""One forward pass as the routers see it: whose tokens these are, and which regime each sequence belongs to.

A passage travels with the forward pass, from `passing` to every adapter layer. Nothing of it stays behind: a packed
training row, an interleaved stream, an eval request and a generation each bring their own, so there is no "current"
bias that one of them could leave switched on for the next.
"""
# Shape suffixes: T tokens, B sequences, D in features, H heads, K experts a head.

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from streamlearn.adapters.layer import HeadLoraLinear


@dataclass(frozen=True)
class RoutingDecision:
    """What one layer decided; the last dimension counts tokens, or sequences where whole sequences are routed."""

    native_HKT: Tensor
    """Logits without bias or noise; carries the graph."""
    selected_HKT: Tensor
    """Bool."""
    gate_HKT: Tensor
    """Weights, zero where not selected; carries the graph."""


class RoutingHook(Protocol):
    """Someone who looks at routing as it happens: an auxiliary loss, a count."""

    def __call__(self, layer: "HeadLoraLinear", routed: RoutingDecision) -> None:
        """One layer has routed."""


class ParallelAdapter(Protocol):
    """Something else beside the frozen linear: the transient expert."""

    def __call__(self, layer: "HeadLoraLinear", x_TD: Tensor, y: Tensor) -> Tensor:
        """`y` with its part added."""


@dataclass
class RoutingContext:
    """Who is in the batch, and who looks on."""

    segment_ids_T: Tensor | None = None
    """(T,) which sequence each token of the flattened input belongs to; None: the input's rows are the sequences."""
    slots_B: Tensor | None = None
    """(B,) regime slot of each sequence, the index of its CP bias; None: no bias."""
    prompt_T: Tensor | None = None
    """(T,) bool, tokens before the first learned one: all that sequence routing may look at; None: every token."""
    vision_units_B: Tensor | None = None
    """(B,) how much of what the vision tower sees belongs to each sequence, in the order of the sequences, in the unit
    that its processor counts in (images, tiles or patches): every layer of the tower sees a multiple of it."""
    explore: bool = False
    """Whether sequence routing adds its noise (MoT eq. 1): in training alone."""
    decoding: bool = False
    """Token by token: a sequence keeps the experts that its prompt chose."""
    hooks: tuple[RoutingHook, ...] = ()
    parallel_adapter: ParallelAdapter | None = None
    choices: dict[str, RoutingDecision] = field(default_factory=dict)
    """Where one gate serves a block: what its first layer decided, for the layers after it."""

    def slots_of(self, num: int, *, per_token: bool, is_vision: bool = False) -> Tensor | None:
        """The slot of each of `num` routed items: tokens, sequences, or what a layer of the vision tower `sees`."""
        if self.slots_B is None:
            return None
        if is_vision:
            assert self.vision_units_B is not None, "whoever brings images counts them"
            return self.slots_B[vision_segment_ids(self.vision_units_B, num)]
        if not per_token:
            return self.slots_B
        return (
            self.slots_B.repeat_interleave(num // len(self.slots_B))
            if self.segment_ids_T is None
            else self.slots_per_token
        )

    @property
    def slots_per_token(self) -> Tensor:
        """(T,) slots; asked by every layer, gathered once."""
        if self._slots_T is None:
            assert self.slots_B is not None
            assert self.segment_ids_T is not None
            self._slots_T = self.slots_B[self.segment_ids_T]
        return self._slots_T

    _slots_T: Tensor | None = None


def vision_segment_ids(vision_units_B: Tensor, num: int) -> Tensor:
    """Which sequence each of `num` items in a layer of the vision tower belongs to."""
    sequences = torch.arange(len(vision_units_B), device=vision_units_B.device)
    return sequences.repeat_interleave(vision_units_B * num // vision_units_B.sum(), output_size=num)


class RoutingContextHolder:
    """The one place where an adapter's layers look for the passage under way."""

    def __init__(self) -> None:
        self.context = RoutingContext()


@contextmanager
def routing_context(model: Any, context: RoutingContext) -> Iterator[RoutingContext]:
    """Inside, forward passes of the PEFT `model` are `passage`."""
    context_holder: RoutingContextHolder = model.base_model.context_holder
    before, context_holder.context = context_holder.context, context
    try:
        yield context
    finally:
        context_holder.context = before
