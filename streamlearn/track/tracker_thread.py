"""The thread that writes to one tracker, and tries again as long as it fails."""

import threading
import time
from collections.abc import Callable

from streamlearn.events import Event, get_logger
from streamlearn.status.tracker_status import TrackerStatus
from streamlearn.track.backlog import Backlog
from streamlearn.track.track_file import TrackFile
from streamlearn.track.tracked_sample import TrackedSample
from streamlearn.track.tracker import Tracker

_PORTION = 50
"""Samples that are written at a time."""
_MIN_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 60.0
CLOSE_S = 5.0
"""A stop waits this long for what is pending; the rest is lost to the tracker."""

_log = get_logger("track")


class TrackerThread:
    """`add`, `status` and `close` may be called by another thread; none of them waits for the tracker but `close`."""

    def __init__(self, tracker: Tracker, notes: TrackFile, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracker = tracker
        self._notes = notes
        self._clock = clock
        self.last_step: int | None = notes.get(tracker.name, "last_step")
        """Up to this step an earlier process may have written."""
        self._backlog = Backlog()
        self._stopping = threading.Event()
        self._finished = False
        self._deadline = 0.0
        self._step: int | None = None
        self._failures = 0
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"track-{tracker.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, sample: TrackedSample) -> None:
        """Write this sample when its turn comes."""
        self._backlog.add(sample)

    @property
    def status(self) -> TrackerStatus:
        """What was written, what waits, and what is wrong."""
        return TrackerStatus(
            self._tracker.name, self._step, len(self._backlog), self._backlog.dropped, self._failures, self._fault
        )

    def close(self, *, finished: bool) -> None:
        """Write what is pending, for at most `CLOSE_S`, and end the thread. Safe to call twice."""
        self._finished = finished
        self._deadline = self._clock() + CLOSE_S
        self._stopping.set()
        self._backlog.added.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        while not (self._stopping.is_set() and (not len(self._backlog) or self._clock() > self._deadline)):
            self._backlog.added.wait()
            self._backlog.added.clear()
            while len(self._backlog):
                if self._attempt(self._write_portion):
                    backoff_s = _MIN_BACKOFF_S
                    continue
                if self._stopping.wait(backoff_s):
                    break
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            if self._stopping.is_set() and len(self._backlog):
                break
        self._attempt(lambda: self._tracker.close(finished=self._finished))

    def _write_portion(self) -> None:
        """Note what may be written from here on, write it, and remove it from the backlog."""
        samples = self._backlog.first(_PORTION)
        self._notes.note(self._tracker.name, last_step=samples[-1].step)
        self._tracker.write(samples)
        self._backlog.remove_first()
        self._step = samples[-1].step

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do it; count and log a failure, whatever it is: training goes on."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a tracker must not end or hold up the run
            self._failures += 1
            fault = str(error) or type(error).__name__
            if self._fault is None:
                _log.warning(Event.TRACKING_FAILED, tracker=self._tracker.name, fault=fault)
            self._fault = fault
            return False
        if self._fault is not None:
            _log.info(Event.TRACKING_RECOVERED, tracker=self._tracker.name, pending=len(self._backlog))
            self._fault = None
        return True
