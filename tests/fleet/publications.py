"""Every publication of a run, copied as it appears, and when each snapshot was written."""

import threading
import time
from pathlib import Path

from streamlearn.publish.publication import FILE, Publication

POLL_S = 0.05


class Publications:
    """Watches a published folder and a folder of snapshots."""

    def __init__(self, published: Path, snapshots: Path) -> None:
        self._published, self._snapshots = published, snapshots
        self.by_sequence: dict[int, Publication] = {}
        self.seen_at: dict[int, float] = {}
        """Unix time at which each was there, by sequence."""
        self.snapshot_at: dict[str, float] = {}
        """Unix time at which each snapshot was there, by name."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Publication | None:
        """The last that was seen."""
        return self.by_sequence[max(self.by_sequence)] if self.by_sequence else None

    def stop(self) -> None:
        """Watch no more."""
        self._stopping.set()
        self._thread.join()

    def replaced_at(self, sequence: int) -> float:
        """When the next one appeared; infinity for the newest."""
        return min((at for other, at in self.seen_at.items() if other > sequence), default=float("inf"))

    def delays_s(self) -> dict[str, float]:
        """Seconds from each snapshot to the publication of it."""
        return {
            publication.snapshot: self.seen_at[sequence] - self.snapshot_at[publication.snapshot]
            for sequence, publication in self.by_sequence.items()
            if publication.snapshot in self.snapshot_at
        }

    def _watch(self) -> None:
        while not self._stopping.is_set():
            if self._snapshots.is_dir():
                for path in self._snapshots.glob("[0-9]*"):
                    self.snapshot_at.setdefault(path.name, time.time())
            if (self._published / FILE).exists():
                newest = Publication.read(self._published)
                if newest.sequence not in self.by_sequence:
                    self.by_sequence[newest.sequence] = newest
                    self.seen_at[newest.sequence] = time.time()
            time.sleep(POLL_S)
