"""Routing context: what routing depends on besides the tokens, such as each token's sequence and its regime.

A `RoutingContext` is set for one forward pass by `routing_context` and read by every adapted layer. No state outlives
the pass: a packed training batch, an evaluation and a generation each bring their own context, so no pass can inherit
the CP bias of another.

Everything about the sequences of a pass is known before it, on the host. Index tensors are built here from host arrays,
once per pass, and copied without waiting, so that no layer has to synchronize with the device.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamlearn.adapters.presets import Routes

# Shape suffixes: T tokens, P tokens of one adapter, B sequences, H heads, K experts a head, D in, O out features.

NO_REGIME = -1
"""Slot of a sequence that the bare backbone computes, without any expert."""

Slot = int | tuple[int, ...]
"""Adapter of a sequence: that of the regime in a slot, none (`NO_REGIME`), or, where each regime has its own adapter,
the mean of the adapters in several slots, at `MEAN_WEIGHT`."""
MEAN_WEIGHT = 0.5
"""Weight of a mean of adapters: half way between the backbone and the adapted weights (WiSE-FT, arXiv 2109.01903,
recommends it where there is no data to choose a weight)."""


def adapters_of(slot: Slot) -> tuple[tuple[int, ...], float]:
    """Slots of the adapters behind a `Slot` other than `NO_REGIME`, and the weight of their mean."""
    return (slot, MEAN_WEIGHT) if isinstance(slot, tuple) else ((slot,), 1.0)


@dataclass(frozen=True)
class Sequences:
    """The sequences of a pass, in order; at least one of `lengths` and `slots` is known."""

    lengths: tuple[int, ...] | None = None
    """Tokens of each in the flattened input; None: each row of the input is a sequence."""
    slots: tuple[Slot, ...] | None = None
    """Adapter of each; None: no regimes."""
    vision_units: tuple[int, ...] | None = None
    """Share of each in the input of the vision tower; None without images. The unit is the processor's (images, tiles
    or patches); every layer of the tower has a fixed number of tokens per unit."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the pass runs."""
    _tensors: dict[Hashable, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num(self) -> int:
        """Number of sequences."""
        return len(self.lengths or self.slots or ())

    @property
    def distinct(self) -> tuple[Slot, ...]:
        """Distinct slots of the sequences, without `NO_REGIME`."""
        return tuple(dict.fromkeys(slot for slot in self.slots or () if slot != NO_REGIME))

    @property
    def adapted_slots(self) -> tuple[int, ...]:
        """Distinct slots of the adapters that the pass uses, including those averaged in a mean."""
        return tuple(dict.fromkeys(number for slot in self.distinct for number in adapters_of(slot)[0]))

    def of_rows(self, rows: Sequence[int]) -> "Sequences":
        """Select sequences whose prompts have been read: one token of each, without images."""
        slots = None if self.slots is None else tuple(self.slots[row] for row in rows)
        return Sequences(lengths=(1,) * len(rows), slots=slots, device=self.device)

    def segment_ids(self, num: int, *, is_vision: bool = False) -> Tensor:
        """Return the index of the sequence that each of `num` tokens belongs to, (num,)."""
        return self._once(("segments", num, is_vision), lambda: self._segments(num, is_vision=is_vision))

    def slots_of(self, num: int, *, per_token: bool, is_vision: bool = False) -> Tensor | None:
        """Return the regime slot of each of `num` routed items, (num,); None without regimes.

        Items are tokens (`per_token`), sequences, or tokens of a layer of the vision tower (`is_vision`). A mean of
        adapters has no slot: it counts as `NO_REGIME`.
        """
        if self.slots is None:
            return None
        slots_B = np.array([NO_REGIME if isinstance(slot, tuple) else slot for slot in self.slots])
        if not (per_token or is_vision):
            return self._once("slots", lambda: slots_B)
        return self._once(("slots", num, is_vision), lambda: slots_B[self._segments(num, is_vision=is_vision)])

    def tokens_of(self, slot: Slot, num: int, *, is_vision: bool) -> Tensor | None:
        """Return the indices of the tokens among `num` that `slot` adapts; None: all."""
        return self._tokens(slot, [own == slot for own in self.slots or ()], num, is_vision=is_vision)

    def tokens_with_regime(self, num: int, *, is_vision: bool) -> Tensor | None:
        """Return the indices of the tokens among `num` that have a regime; None: all have, or there are no regimes."""
        return self._tokens(None, [slot != NO_REGIME for slot in self.slots or ()], num, is_vision=is_vision)

    def _tokens(self, key: Slot | None, selected: Sequence[bool], num: int, *, is_vision: bool) -> Tensor | None:
        if all(selected):
            return None
        selected_B = np.array(selected)
        return self._once(
            ("tokens", key, num, is_vision),
            lambda: np.flatnonzero(selected_B[self._segments(num, is_vision=is_vision)]),
        )

    def _segments(self, num: int, *, is_vision: bool) -> NDArray[np.int64]:
        """`segment_ids` on the host."""
        if is_vision:
            assert self.vision_units is not None, "a pass with images has their units"
            units_B = np.array(self.vision_units)
            lengths = units_B * num // units_B.sum()
        elif self.lengths is not None:
            lengths = np.array(self.lengths)
        else:
            assert self.slots is not None, "rows are counted by their slots"
            lengths = np.full(len(self.slots), num // len(self.slots))
        return np.repeat(np.arange(len(lengths)), lengths)

    def _once(self, key: Hashable, make: Callable[[], NDArray[np.int64]]) -> Tensor:
        """Build a tensor that all layers of the pass share, and keep it."""
        if key not in self._tensors:
            self._tensors[key] = torch.from_numpy(make()).to(self.device, non_blocking=True)
        return self._tensors[key]


@dataclass(frozen=True)
class AdaptedLayer:
    """Description of an adapted linear, passed to hooks and parallel adapters."""

    name: str
    """The linear's name in the backbone, for example model.layers.0.mlp.up_proj; `Bank.name`."""
    block: str
    """Scope of a router: the linear itself, or its transformer block where whole sequences are routed."""
    is_vision: bool
    """Whether it belongs to the vision tower or projector: its tokens are those of images, not of the sequences."""
    routes: Routes
    """Unit of routing."""
    scaling: float
    """Factor on the experts' output: alpha / r."""
    adapter: str
    """PEFT's name for the adapter."""


@dataclass(frozen=True)
class RoutingDecision:
    """Routing of one adapter of a layer. The last dimension is T, or B where whole sequences are routed."""

    native_HKT: Tensor
    """Logits without bias and noise; part of the autograd graph."""
    selected_HKT: Tensor
    """Bool."""
    gate_HKT: Tensor
    """Weights of the experts, zero where not selected; part of the autograd graph."""
    tokens_T: Tensor | None = None
    """Indices in the pass of the tokens that were routed; None: all."""
    num: int | None = None
    """Tokens, or sequences, of the pass, of which `tokens_T` may be some; None: those of the last dimension."""


class RoutingHook(Protocol):
    """Called with every routing decision of a forward pass: an auxiliary loss, a counter."""

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        """Receive the decision of one layer, in the order of the forward pass."""


class ParallelAdapter(Protocol):
    """A second adapter next to the frozen linears: the transient expert."""

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        """Add this adapter's output for `x_TD` (..., D) to the layer's output `y` (..., O) and return the sum."""


@dataclass
class RoutingContext:
    """The sequences of one forward pass, and the observers of its routing."""

    sequences: Sequences | None = None
    """None: each row of the input is a sequence, and there are no regimes."""
    prompt_T: Tensor | None = None
    """(T,) bool, tokens before the first learned one. Sequences are routed by these only; None: by all."""
    explore: bool = False
    """Whether sequence routing adds its noise (MoT eq. 1) and inputs of experts are dropped; set in training only."""
    decoding: bool = False
    """Whether sequences are decoded token by token: each keeps the experts selected for its prompt."""
    hooks: tuple[RoutingHook, ...] = ()
    parallel_adapter: ParallelAdapter | None = None
    recomputing: bool = False
    """Whether layers are recomputed for the backward pass, which counts no load a second time."""
    block_decisions: dict[tuple[str, str], RoutingDecision] = field(default_factory=dict)
    """Where one gate serves a block: the decision of its first layer, for the layers after it; by adapter and block."""


class RoutingContextHolder:
    """The routing context of the passes in progress, shared by all layers of a model, which one thread uses."""

    def __init__(self) -> None:
        self.outside = RoutingContext()
        """The context of passes outside of `routing_context`: no regimes, no hooks."""
        self.context = self.outside
        self.before_pass: Callable[[RoutingContext], None] | None = None
        """Called when `routing_context` sets a context; it may load the adapters that the passes use."""

    @contextmanager
    def using(self, context: RoutingContext) -> Iterator[None]:
        """Set the context inside the block."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before


@contextmanager
def routing_context(model: Any, context: RoutingContext) -> Iterator[RoutingContext]:
    """Run the forward passes of the PEFT `model` inside the block under `context`."""
    holder: RoutingContextHolder = model.base_model.context_holder
    if holder.before_pass is not None:
        holder.before_pass(context)
    with holder.using(context):
        yield context
