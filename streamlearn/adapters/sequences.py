"""The sequences of a forward pass: where each lies, and what adapts it.

All of it is known before the pass, on the host. So no layer asks the device whose tokens are whose: what layers index
with is made here from host arrays, once for all layers, and copied to the device without waiting for it.
"""
# Shape suffixes: T tokens, P tokens of one adapter, B sequences.

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
