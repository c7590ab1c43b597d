"""The protocol of a tracker."""

from collections.abc import Sequence
from typing import Protocol

from streamlearn.track.tracked_sample import TrackedSample


class Tracker(Protocol):
    """Writes samples somewhere. Only its own thread calls it."""

    name: str

    def write(self, samples: Sequence[TrackedSample]) -> None:
        """Write samples, oldest first; may be called again with the same ones after an error.

        Raises:
            TrackError: they could not be written now.
        """

    def close(self, *, finished: bool) -> None:
        """Release everything; `finished` is whether the run ended as asked. Raises TrackError."""
