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
class Routed:
    """What one layer decided; the last dimension counts tokens, or sequences where whole sequences are routed."""

    native_HKT: Tensor
    """Logits without bias or noise; carries the graph."""
    selected_HKT: Tensor
    """Bool."""
    gate_HKT: Tensor
    """Weights, zero where not selected; carries the graph."""


class Watcher(Protocol):
    """Someone who looks at routing as it happens: an auxiliary loss, a count."""

    def __call__(self, layer: "HeadLoraLinear", routed: Routed) -> None:
        """One layer has routed."""


class Companion(Protocol):
    """Something else beside the frozen linear: the transient expert."""

    def __call__(self, layer: "HeadLoraLinear", x_TD: Tensor, y: Tensor) -> Tensor:
        """`y` with its part added."""


@dataclass
class Passage:
    """Who is in the batch, and who looks on."""

    owner_T: Tensor | None = None
    """(T,) which sequence each token of the flattened input belongs to; None: the input's rows are the sequences."""
    slots_B: Tensor | None = None
    """(B,) regime slot of each sequence, the index of its CP bias; None: no bias."""
    prompt_T: Tensor | None = None
    """(T,) bool, tokens before the first learned one: all that sequence routing may look at; None: every token."""
    seen_B: Tensor | None = None
    """(B,) how much of what the vision tower sees belongs to each sequence, in the order of the sequences, in the unit
    that its processor counts in (images, tiles or patches): every layer of the tower sees a multiple of it."""
    explore: bool = False
    """Whether sequence routing adds its noise (MoT eq. 1): in training alone."""
    decoding: bool = False
    """Token by token: a sequence keeps the experts that its prompt chose."""
    watchers: tuple[Watcher, ...] = ()
    companion: Companion | None = None
    choices: dict[str, Routed] = field(default_factory=dict)
    """Where one gate serves a block: what its first layer decided, for the layers after it."""

    def slots_of(self, num: int, *, per_token: bool, sees: bool = False) -> Tensor | None:
        """The slot of each of `num` routed items: tokens, sequences, or what a layer of the vision tower `sees`."""
        if self.slots_B is None:
            return None
        if sees:
            assert self.seen_B is not None, "whoever brings images counts them"
            return self.slots_B[owners_of_seen(self.seen_B, num)]
        if not per_token:
            return self.slots_B
        return (
            self.slots_B.repeat_interleave(num // len(self.slots_B)) if self.owner_T is None else self.slots_per_token
        )

    @property
    def slots_per_token(self) -> Tensor:
        """(T,) slots; asked by every layer, gathered once."""
        if self._slots_T is None:
            assert self.slots_B is not None
            assert self.owner_T is not None
            self._slots_T = self.slots_B[self.owner_T]
        return self._slots_T

    _slots_T: Tensor | None = None


def owners_of_seen(seen_B: Tensor, num: int) -> Tensor:
    """Which sequence each of `num` items in a layer of the vision tower belongs to."""
    sequences = torch.arange(len(seen_B), device=seen_B.device)
    return sequences.repeat_interleave(seen_B * num // seen_B.sum(), output_size=num)


class Course:
    """The one place where an adapter's layers look for the passage under way."""

    def __init__(self) -> None:
        self.passage = Passage()


@contextmanager
def passing(model: Any, passage: Passage) -> Iterator[Passage]:
    """Inside, forward passes of the PEFT `model` are `passage`."""
    course: Course = model.base_model.course
    before, course.passage = course.passage, passage
    try:
        yield passage
    finally:
        course.passage = before
