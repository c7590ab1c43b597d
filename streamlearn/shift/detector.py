"""Change detectors on a series of numbers, and how one resumes after a restart.

The internal state of a river detector is not saved. Its inputs are, and they are replayed. The history is bounded: at
`2 * HISTORY` values the detector is rebuilt from the last `HISTORY`. This happens without a restart too, so a restored
detector has received the same values in the same order as one that never stopped.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

HISTORY = 512


class Detector(Protocol):
    """A change detector on a series of numbers, in the manner of river."""

    @property
    def drift_detected(self) -> bool:
        """Whether the last update declared a change. The detector has started afresh then."""

    def update(self, value: float) -> None:
        """Process the next value."""

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Arrays from which `load_state` continues bit for bit."""

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Restore what `state` returned."""


class ReplayedDetector:
    """A river detector that is restored by replaying its inputs."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._detector = build()
        self._history: list[float] = []
        self.drift_detected = False

    def update(self, value: float) -> None:
        """See `Detector.update`."""
        if len(self._history) == 2 * HISTORY:
            self._replay(self._history[HISTORY:])
        self._history.append(value)
        self._detector.update(value)
        self.drift_detected = self._detector.drift_detected
        if self.drift_detected:
            self._replay([])

    def state(self) -> dict[str, NDArray[np.generic]]:
        """See `Detector.state`."""
        return {"history": np.array(self._history, dtype=np.float64)}

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """See `Detector.load_state`."""
        self._replay(arrays["history"].tolist())
        self.drift_detected = False

    def _replay(self, history: list[float]) -> None:
        self._detector, self._history = self._build(), history
        for value in history:
            self._detector.update(value)
