"""What routing depends on besides the tokens: each token's sequence, each sequence's regime.

A `RoutingContext` is set for one forward pass by `routing_context` and read by every adapted layer. No state outlives
the pass: a packed training batch, an interleaved stream, an evaluation and a generation each bring their own context,
so there is no "current" CP bias that one of them could leave set for the next.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamlearn.adapters.presets import Routes

# The sequences of a forward pass: where each lies, and what adapts it.
#
# All of it is known before the pass, on the host. So no layer asks the device whose tokens are whose: what layers index
# with is made here from host arrays, once for all layers, and copied to the device without waiting for it.


# Shape suffixes: T tokens, P tokens of one adapter, B sequences.


NO_REGIME = -1
"""Slot of a sequence that the untouched backbone computes: its tokens get nothing from any expert."""

Slot = int | tuple[int, ...]
"""What adapts a sequence: the regime in a slot, `NO_REGIME`, or, where regimes have adapters of their own, the mean of
the adapters in several slots, at `MEAN_WEIGHT`."""
MEAN_WEIGHT = 0.5
"""Weight of a mean of adapters: half way between the backbone and what it was trained to (WiSE-FT, arXiv 2109.01903,
recommends this where no data can choose)."""


def adapters_of(slot: Slot) -> tuple[tuple[int, ...], float]:
    """The slots whose adapters a slot other than `NO_REGIME` stands for, and the weight of their mean."""
    return (slot, MEAN_WEIGHT) if isinstance(slot, tuple) else ((slot,), 1.0)


@dataclass(frozen=True)
class Sequences:
    """The sequences of a pass, in order; at least one of `lengths` and `slots` is known."""

    lengths: tuple[int, ...] | None = None
    """Tokens of each in the flattened input; None: each row of the input is a sequence."""
    slots: tuple[Slot, ...] | None = None
    """What adapts each; None: no regimes."""
    vision_units: tuple[int, ...] | None = None
    """Share of each in the input of the vision tower; None without images. The unit is the processor's (images, tiles
    or patches); every layer of the tower has a fixed number of tokens per unit."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the pass runs."""
    _found: dict[Hashable, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num(self) -> int:
        """Number of sequences."""
        return len(self.lengths or self.slots or ())

    @property
    def distinct(self) -> tuple[Slot, ...]:
        """What adapts the sequences, each once, without `NO_REGIME`; empty if nothing does, or without regimes."""
        return tuple(dict.fromkeys(slot for slot in self.slots or () if slot != NO_REGIME))

    @property
    def adapted_slots(self) -> tuple[int, ...]:
        """The slots whose adapters the pass uses, those of means among them, each once."""
        return tuple(dict.fromkeys(each for slot in self.distinct for each in adapters_of(slot)[0]))

    def of_rows(self, rows: Sequence[int]) -> "Sequences":
        """Some of the sequences, one token of each, without images: those of a batch whose prompts were read."""
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
        return self._tokens(slot, [each == slot for each in self.slots or ()], num, is_vision=is_vision)

    def tokens_with_regime(self, num: int, *, is_vision: bool) -> Tensor | None:
        """Return the indices of the tokens among `num` that have a regime; None: all have, or there are no regimes."""
        return self._tokens(None, [each != NO_REGIME for each in self.slots or ()], num, is_vision=is_vision)

    def _tokens(self, key: Slot | None, chosen: Sequence[bool], num: int, *, is_vision: bool) -> Tensor | None:
        if all(chosen):
            return None
        chosen_B = np.array(chosen)
        return self._once(
            ("tokens", key, num, is_vision),
            lambda: np.flatnonzero(chosen_B[self._segments(num, is_vision=is_vision)]),
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
        """A tensor that all layers of the pass share."""
        if key not in self._found:
            self._found[key] = torch.from_numpy(make()).to(self.device, non_blocking=True)
        return self._found[key]


# Shape suffixes: T tokens, B sequences, D in features, O out features, H heads, K experts a head.


@dataclass(frozen=True)
class AdaptedLayer:
    """Description of an adapted linear, passed to hooks and parallel adapters."""

    name: str
    """The linear's name in the backbone, for example model.layers.0.mlp.up_proj; `Bank.name`."""
    block: str
    """What shares a router: the linear itself, or its transformer block where whole sequences are routed."""
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
    """A second adapter beside the frozen linears: the transient expert."""

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        """Add this adapter's output for `x_TD` (..., D) to the layer's output `y` (..., O) and return the sum."""


@dataclass
class RoutingContext:
    """The sequences of one forward pass, and what observes its routing."""

    sequences: Sequences | None = None
    """None: each row of the input is a sequence, and there are no regimes."""
    prompt_T: Tensor | None = None
    """(T,) bool, tokens before the first learned one. Sequences are routed by these only; None: by all."""
    explore: bool = False
    """Whether sequence routing adds its noise (MoT eq. 1); set in training only."""
    decoding: bool = False
    """Whether sequences are decoded token by token: each keeps the experts selected for its prompt."""
    hooks: tuple[RoutingHook, ...] = ()
    parallel_adapter: ParallelAdapter | None = None
    recomputing: bool = False
    """Whether layers are computed again for the backward pass, which counts no load a second time."""
    block_decisions: dict[tuple[str, str], RoutingDecision] = field(default_factory=dict)
    """Where one gate serves a block: the decision of its first layer, for the layers after it; by adapter and block."""


class _OfThread(threading.local):
    """What the passes of one thread run under."""

    context: RoutingContext | None = None
    """None before the thread's first pass."""
    default: RoutingContext | None = None
    """The context of its newest pass outside of `routing_context`."""


class RoutingContextHolder:
    """The context of the forward pass in progress, shared by all layers of one adapter. Each thread has its own pass.

    A thread in which no pass began, such as one of autograd's, finds the context that was set last.
    """

    def __init__(self) -> None:
        self._own = _OfThread()
        self._latest = RoutingContext()
        self.before_pass: Callable[[RoutingContext], None] | None = None
        """Called when a context is set; it may bring the adapters that the passes use into memory."""

    @property
    def context(self) -> RoutingContext:
        """The context of this thread's pass."""
        own = self._own.context
        return self._latest if own is None else own

    @context.setter
    def context(self, context: RoutingContext) -> None:
        self._set(context)

    @contextmanager
    def holding(self, context: RoutingContext) -> Iterator[None]:
        """Set the context of this thread's passes inside the block."""
        before = self._own.context
        self._set(context)
        try:
            yield
        finally:
            self._set(before)

    def begin_pass(self, cache: Any) -> None:
        """A forward pass begins; one outside of `routing_context` gets a context of its own.

        Where sequences are routed, a pass that adds to keys and values in `cache` keeps the experts of the prompts.
        """
        own = self._own
        if own.context is not own.default:
            return
        if own.context is not None and own.context.block_decisions and cache is not None and cache.get_seq_length():
            own.context.decoding = True
        else:
            self._set_default()

    def end_pass(self) -> None:
        """It ended: nothing of its graph is kept."""
        if self._own.context is self._own.default and torch.is_grad_enabled():
            self._set_default()

    def _set_default(self) -> None:
        self._own.default = RoutingContext()
        self._set(self._own.default)

    def _set(self, context: RoutingContext | None) -> None:
        self._own.context = context
        self._latest = RoutingContext() if context is None else context

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: no pass is in progress in it."""
        return {"before_pass": self.before_pass}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.before_pass = state["before_pass"]


@contextmanager
def routing_context(model: Any, context: RoutingContext) -> Iterator[RoutingContext]:
    """Run the forward passes of the PEFT `model` inside the block under `context`."""
    context_holder: RoutingContextHolder = model.base_model.context_holder
    if context_holder.before_pass is not None:
        context_holder.before_pass(context)
    with context_holder.holding(context):
        yield context
