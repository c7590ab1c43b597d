"""All trackers of a run, fed from the board by one thread."""

import threading
from collections.abc import Callable, Sequence

from streamlearn.status.board import Board
from streamlearn.status.status import Phase
from streamlearn.status.tracker_status import TrackerStatus
from streamlearn.track.series import SeriesReader
from streamlearn.track.track_file import TrackFile
from streamlearn.track.tracker import Tracker
from streamlearn.track.tracker_thread import TrackerThread


class Trackers:
    """The loop calls `note_rewind` and reads `status`, which wait for nothing."""

    def __init__(
        self, trackers: Sequence[Tracker], notes: TrackFile, interval_s: float, wall: Callable[[], float]
    ) -> None:
        self._threads = [TrackerThread(tracker, notes) for tracker in trackers]
        self._readers = [SeriesReader(thread.last_step, wall) for thread in self._threads]
        self._interval_s = interval_s
        self._board: Board | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._rewound_to: int | None = None
        self._thread = threading.Thread(target=self._work, name="track", daemon=True)

    def start(self, board: Board) -> None:
        """Read the board from now on."""
        self._board = board
        for thread in self._threads:
            thread.start()
        self._thread.start()

    def note_rewind(self, step: int) -> None:
        """The run went back to this step."""
        with self._lock:
            self._rewound_to = step if self._rewound_to is None else min(step, self._rewound_to)

    @property
    def status(self) -> tuple[TrackerStatus, ...]:
        """Of each tracker."""
        return tuple(thread.status for thread in self._threads)

    def close(self) -> None:
        """Read the board once more, and end every thread; blocks for seconds at most. Safe to call twice."""
        if self._board is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self._sample()
        finished = self._board.read().phase is Phase.STOPPING
        for thread in self._threads:
            thread.close(finished=finished)

    def _work(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        assert self._board is not None
        with self._lock:
            rewound_to, self._rewound_to = self._rewound_to, None
            status = self._board.read()
        if status.phase in (Phase.STARTING, Phase.RESTORING):
            return
        for reader, thread in zip(self._readers, self._threads, strict=True):
            sample = reader.read(status, rewound_to)
            if sample is not None:
                thread.add(sample)
