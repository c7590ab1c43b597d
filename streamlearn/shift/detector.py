"""What finds a change in a series of numbers, and how it is kept over a restart.

A wrapped detector's inner state is not written down; its inputs are, and replayed. The history is bounded: at
`2 * HISTORY` values the detector is built anew from the last `HISTORY`, always, so that a restored one and one that
never stopped have seen the same values in the same order.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

HISTORY = 512


class Detector(Protocol):
    """A change detector on a series of numbers."""

    def update(self, value: float) -> bool:
        """Take the next value; True at the one where a change is declared, after which it starts afresh."""

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Plain arrays from which `load_state` goes on, bit for bit."""

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Become what `state` told."""


class ReplayedDetector:
    """A river detector, restored by replaying its inputs."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._inner = build()
        self._history: list[float] = []

    def update(self, value: float) -> bool:
        """See `Detector.update`."""
        if len(self._history) == 2 * HISTORY:
            self._replay(self._history[HISTORY:])
        self._history.append(value)
        self._inner.update(value)
        if self._inner.drift_detected:
            self._replay([])
            return True
        return False

    def state(self) -> dict[str, NDArray[np.generic]]:
        """See `Detector.state`."""
        return {"history": np.array(self._history, dtype=np.float64)}

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """See `Detector.load_state`."""
        self._replay(arrays["history"].tolist())

    def _replay(self, history: list[float]) -> None:
        self._inner, self._history = self._build(), history
        for value in history:
            self._inner.update(value)
