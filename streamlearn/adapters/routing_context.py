"""What routing depends on besides the tokens: each token's sequence, each sequence's regime.

A `RoutingContext` is set for one forward pass by `routing_context` and read by every adapted layer. No state outlives
the pass: a packed training batch, an interleaved stream, an evaluation and a generation each bring their own context,
so there is no "current" CP bias that one of them could leave set for the next.
"""
# Shape suffixes: T tokens, B sequences, D in features, O out features, H heads, K experts a head.

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from streamlearn.adapters.config import Routes

NO_REGIME = -1
"""Slot of a sequence that the untouched backbone computes: its tokens get nothing from any expert."""

Slot = int | tuple[int, ...]
"""What adapts a sequence: the regime in a slot, `NO_REGIME`, or, where regimes have adapters of their own, the mean of
the adapters in several slots, at `MEAN_WEIGHT`."""
MEAN_WEIGHT = 0.5
"""Weight of a mean of adapters: half way between the backbone and what it was trained to (WiSE-FT, arXiv 2109.01903,
recommends this where no data can choose)."""


_FIRST_MEAN = NO_REGIME - 1


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

    segment_ids_T: Tensor | None = None
    """(T,) index of the sequence that each token of the flattened input belongs to; None: each input row is one."""
    slots_B: Tensor | None = None
    """(B,) regime slot of each sequence, which selects its adapter or its CP bias, or `NO_REGIME`; -2 - i: the slots
    `means[i]`; None: no regimes."""
    prompt_T: Tensor | None = None
    """(T,) bool, tokens before the first learned one. Sequences are routed by these only; None: by all."""
    vision_units_B: Tensor | None = None
    """(B,) share of each sequence, in order, in the input of the vision tower. The unit is the processor's (images,
    tiles or patches); every layer of the tower has a fixed number of tokens per unit."""
    explore: bool = False
    """Whether sequence routing adds its noise (MoT eq. 1); set in training only."""
    decoding: bool = False
    """Whether sequences are decoded token by token: each keeps the experts selected for its prompt."""
    hooks: tuple[RoutingHook, ...] = ()
    means: tuple[tuple[int, ...], ...] = ()
    """Slots of each mean of adapters in the pass, see `slots_B`."""
    parallel_adapter: ParallelAdapter | None = None
    block_decisions: dict[tuple[str, str], RoutingDecision] = field(default_factory=dict)
    """Where one gate serves a block: the decision of its first layer, for the layers after it; by adapter and block."""

    @property
    def slots(self) -> tuple[int, ...] | None:
        """The distinct values of `slots_B` but `NO_REGIME`, read from the device once for all layers; None without.

        Empty if every sequence is computed by the untouched backbone.
        """
        return None if self.slots_B is None else tuple(slot for slot in self._distinct if slot != NO_REGIME)

    @property
    def adapted_slots(self) -> tuple[int, ...]:
        """The distinct slots whose adapters the pass uses, those of means among them."""
        found = (each for slot in self.slots or () for each in self.adapters_of(slot)[0])
        return tuple(dict.fromkeys(found))

    def adapters_of(self, slot: int) -> tuple[tuple[int, ...], float]:
        """The slots whose adapters one of `slots` stands for, and the weight of their mean."""
        return ((slot,), 1.0) if slot >= 0 else (self.means[_FIRST_MEAN - slot], MEAN_WEIGHT)

    def slots_of(self, num: int, *, per_token: bool, is_vision: bool = False) -> Tensor | None:
        """Return the regime slot of each of `num` routed items, (num,); None without regimes.

        Items are tokens (`per_token`), sequences, or tokens of a layer of the vision tower (`is_vision`).
        """
        if self.slots_B is None:
            return None
        if is_vision:
            assert self.vision_units_B is not None, "a context with images has their units"
            return self.slots_B[vision_segment_ids(self.vision_units_B, num)]
        if not per_token:
            return self.slots_B
        if self.segment_ids_T is None:
            return self.slots_B.repeat_interleave(num // len(self.slots_B))
        return self.slots_per_token

    def tokens_of(self, slot: int, num: int, *, is_vision: bool) -> Tensor | None:
        """Return the indices of a regime's tokens among `num`, found once for all layers; None: all are."""
        return None if self._distinct == (slot,) else self._tokens(slot, num, is_vision=is_vision)

    def tokens_with_regime(self, num: int, *, is_vision: bool) -> Tensor | None:
        """Return the indices of the tokens among `num` that have a regime; None: all have."""
        if self.slots_B is None or NO_REGIME not in self._distinct:
            return None
        return self._tokens(None, num, is_vision=is_vision)

    @property
    def slots_per_token(self) -> Tensor:
        """(T,) slots, gathered once for all layers; needs `slots_B` and `segment_ids_T`."""
        if self._slots_T is None:
            assert self.slots_B is not None
            assert self.segment_ids_T is not None
            self._slots_T = self.slots_B[self.segment_ids_T]
        return self._slots_T

    @property
    def _distinct(self) -> tuple[int, ...]:
        if self._distinct_slots is None:
            assert self.slots_B is not None
            self._distinct_slots = tuple(sorted(set(self.slots_B.tolist())))
        return self._distinct_slots

    def _tokens(self, slot: int | None, num: int, *, is_vision: bool) -> Tensor:
        """The tokens of a regime, or for None of any; see `tokens_of`."""
        key = (slot, num, is_vision)
        if key not in self._found_tokens:
            slots_T = self.slots_of(num, per_token=True, is_vision=is_vision)
            assert slots_T is not None
            self._found_tokens[key] = (slots_T != NO_REGIME if slot is None else slots_T == slot).nonzero()[:, 0]
        return self._found_tokens[key]

    # Not copied by `dataclasses.replace`: a context of other sequences computes its own.
    _slots_T: Tensor | None = field(default=None, init=False)
    _distinct_slots: tuple[int, ...] | None = field(default=None, init=False)
    _found_tokens: dict[tuple[int | None, int, bool], Tensor] = field(default_factory=dict, init=False)


def encode_slots(slots: Sequence[Slot], device: torch.device) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
    """Return `slots_B` and `means` of a context for sequences adapted by `slots`."""
    means = tuple(dict.fromkeys(slot for slot in slots if isinstance(slot, tuple)))
    codes = {slot: _FIRST_MEAN - index for index, slot in enumerate(means)}
    return torch.tensor([codes[slot] if isinstance(slot, tuple) else slot for slot in slots], device=device), means


def vision_segment_ids(vision_units_B: Tensor, num: int) -> Tensor:
    """Return the index of the sequence that each of `num` tokens in a layer of the vision tower belongs to, (num,)."""
    sequences = torch.arange(len(vision_units_B), device=vision_units_B.device)
    return sequences.repeat_interleave(vision_units_B * num // vision_units_B.sum(), output_size=num)


class _OfThread(threading.local):
    """What the passes of one thread run under."""

    context: RoutingContext | None = None
    """None before the thread's first pass."""
    default: RoutingContext | None = None
    """The context of its newest pass outside of `routing_context`."""


class RoutingContextHolder:
    """The context of the forward pass in progress, shared by all layers of one adapter. Each thread has its own pass.

    A thread in which no pass began, such as one of autograd's that computes a checkpointed block again, finds the
    context that was set last.
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
