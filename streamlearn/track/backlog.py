"""Samples that wait to be written: bounded, thread-safe."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from streamlearn.track.tracked_sample import TrackedSample

MAX_SAMPLES = 2_000
"""When more wait, every other one is dropped, of later ones too: a long outage leaves a coarser series, not a gap."""
_MAX_NOTES = 200


class Backlog:
    """Oldest first. One thread adds, one takes."""

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self._max_samples = max_samples
        self._lock = threading.Lock()
        self._samples: list[TrackedSample] = []
        self._taken = 0
        self._every = 1
        self._count = 0
        self._carried: TrackedSample | None = None
        """Dropped since the last one that was kept: its notes and rewinds go to the next one."""
        self.dropped = 0
        """Samples whose points were dropped."""
        self.added = threading.Event()
        """Set by `add`; the thread that takes clears it."""

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: TrackedSample) -> None:
        """Append one; never blocks on anything but another `add` or `take`."""
        with self._lock:
            if not self._samples:
                self._every, self._count = 1, 0
            if self._count % self._every:
                self._drop(sample)
            else:
                self._samples.append(self._with_carried(sample))
            self._count += 1
            if len(self._samples) > self._max_samples:
                self._thin()
        self.added.set()

    def first(self, number: int) -> Sequence[TrackedSample]:
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
        """Drop every other sample that is not being written, and let half as many in."""
        waiting, kept = self._samples[self._taken :], []
        for number, sample in enumerate(waiting):
            if number % 2:
                self._drop(sample)
            else:
                kept.append(self._with_carried(sample))
        self._samples[self._taken :] = kept
        self._every *= 2

    def _drop(self, sample: TrackedSample) -> None:
        self.dropped += 1
        self._carried = self._with_carried(sample)

    def _with_carried(self, sample: TrackedSample) -> TrackedSample:
        carried, self._carried = self._carried, None
        if carried is None:
            return sample
        merged = carried.without_points(sample)
        return replace(merged, notes=merged.notes[-_MAX_NOTES:])
