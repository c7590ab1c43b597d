"""A steady rate."""

import threading
import time
from collections.abc import Callable

_MAX_DEBT_S = 1.0
"""After a pause longer than this the schedule begins anew, so that no burst follows."""
_MIN_WAIT_S = 0.001  # a shorter wait costs more than it is worth; the next one makes up for it


class Pacer:
    """Due times `1 / rate` apart, from the monotonic clock.

    What was late is caught up with, unless it was late by more than a second.
    """

    def __init__(
        self,
        rate: float | None,
        stop: threading.Event,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """Take the rate, per second; None is as fast as possible. `wait` sleeps, at most until `stop` is set."""
        self._interval_s = 1.0 / rate if rate else 0.0
        self._stop = stop
        self._clock = clock
        self._wait = wait or stop.wait
        self._due: float | None = None

    def wait(self) -> bool:
        """Wait until the next one is due; return False if it is time to stop instead."""
        if self._interval_s and not self._stop.is_set():
            now = self._clock()
            if self._due is None or now - self._due > _MAX_DEBT_S:
                self._due = now
            if self._due - now > _MIN_WAIT_S:
                self._wait(self._due - now)
            self._due += self._interval_s
        return not self._stop.is_set()
