"""SIGTERM and SIGINT at any time of a daemon's life. Imports nothing heavy: it is there before what takes seconds."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopEarly(BaseException):  # like KeyboardInterrupt: nothing on the way may catch it
    """A signal came while rooms were being opened and there was no loop yet to ask."""


class StopSignals:
    """What the first signal does; a second one is the system's own.

    1. While modules are imported nothing is open or written: the process exits 0 at once.
    2. While rooms are opened (`opening` was called): StopEarly, so that they are closed again.
    3. Once there is a loop (`ask` was called): it ends after its step, with a snapshot.
    """

    def __init__(self) -> None:
        self._on_signal: Callable[[str], object] = lambda _: os._exit(
            0
        )  # 1. no exception: imports catch what they like

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals inside."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def opening(self) -> None:
        """From here on there is something to close."""
        self._on_signal = _raise

    def ask(self, stop: Callable[[str], object]) -> None:
        """From here on `stop` is called with the signal's name."""
        self._on_signal = stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        self._on_signal(signal.Signals(number).name)


def _raise(name: str) -> None:
    raise StopEarly(name)
