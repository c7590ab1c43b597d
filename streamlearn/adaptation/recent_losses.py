"""The last losses of each regime's records, measured before they were trained on."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_LOSSES = 32
"""Losses kept per regime. More would be of records from before the adapter had learned what it knows now."""


class RecentLosses:
    """By slot, oldest first."""

    def __init__(self) -> None:
        self._losses: dict[int, deque[float]] = {}

    def add(self, slot: int, loss: float) -> None:
        """Add the loss of the newest record of the regime in a slot, nats per learned token."""
        if math.isfinite(loss):
            self._losses.setdefault(slot, deque(maxlen=NUM_LOSSES)).append(loss)

    def of(self, slot: int) -> Sequence[float]:
        """The losses of the regime in a slot; empty before its first record."""
        return tuple(self._losses.get(slot, ()))

    def forget(self, slot: int) -> None:
        """Discard a slot's losses: they are another regime's, or of other answers."""
        self._losses.pop(slot, None)

    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays for a snapshot."""
        return {str(slot): np.array(losses, dtype=np.float64) for slot, losses in self._losses.items()}

    def load_state(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `state` returned; nothing for a snapshot from before they were kept."""
        self._losses = {int(slot): deque(losses.tolist(), maxlen=NUM_LOSSES) for slot, losses in arrays.items()}
