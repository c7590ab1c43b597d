"""Samples that wait to be written: bounded, thread-safe."""

import threading
from collections.abc import Sequence

from streamlearn.track.sample import Sample

MAX_SAMPLES = 2_000
"""At most so many wait; then every other one is dropped, so that a long outage leaves a coarser series, not a gap."""
_MAX_NOTES = 200


class Backlog:
    """Oldest first. One thread adds, one takes."""

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self._max_samples = max_samples
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self._taken = 0
        self.dropped = 0
        """Samples whose points were dropped."""
        self.added = threading.Event()
        """Set by `add`; the thread that takes clears it."""

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        """Append one; never blocks on anything but another `add` or `take`."""
        with self._lock:
            self._samples.append(sample)
            if len(self._samples) > self._max_samples:
                self._thin()
        self.added.set()

    def first(self, number: int) -> Sequence[Sample]:
        """The oldest ones, which stay until `remove`."""
        with self._lock:
            self._taken = min(number, len(self._samples))
            return tuple(self._samples[: self._taken])

    def remove_first(self) -> None:
        """Remove what `first` returned: it was written."""
        with self._lock:
            del self._samples[: self._taken]
            self._taken = 0

    def _thin(self) -> None:
        """Drop every other sample that is not being written; its notes and rewinds go to the next one."""
        waiting = self._samples[self._taken :]
        kept = []
        for first, second in zip(waiting[0::2], waiting[1::2], strict=False):
            merged = first.without_points(second)
            kept.append(Sample(merged.step, merged.at, merged.points, merged.notes[-_MAX_NOTES:], merged.rewound_to))
        kept += waiting[len(waiting) & ~1 :]
        self.dropped += len(waiting) - len(kept)
        self._samples[self._taken :] = kept
