"""SIGTERM, SIGINT and SIGHUP during the whole life of a daemon.

Imports nothing heavy, so that the handlers are installed before the imports that take seconds.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopEarly(BaseException):  # not an Exception: like KeyboardInterrupt it must pass every handler on its way
    """A stop signal arrived while components were being opened, before there was a loop to stop."""


class StopSignals:
    """What the first stop signal does, by phase of the daemon's life.

    1. While modules are imported, nothing is open or written yet: the process exits 0 at once.
    2. While components are opened (`raise_on_signal` was called): StopEarly is raised, so that they are closed again.
    3. While the loop runs (`call_on_signal` was called): it ends after its step, with a snapshot. So it does at once if
       the StopEarly of a signal that came before was lost: Python drops what is raised in a finaliser.

    A second SIGTERM or SIGINT ends the process at once, without a snapshot. A second SIGHUP is ignored: a terminal that
    is closed may send two, one from the shell and one from the kernel.
    """

    def __init__(self) -> None:
        self._on_signal: Callable[[str], object] = _exit_cleanly  # 1.
        self._received: str | None = None
        self._terminals: list[int] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block. A SIGHUP that is ignored stays ignored, as nohup(1) expects."""
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        handled = [number for number in STOPPING if not _is_ignored_hangup(number)]
        before = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def raise_on_signal(self) -> None:
        """From now on, raise StopEarly: there is something to close."""
        self._on_signal = _raise_stop_early

    def call_on_signal(self, stop: Callable[[str], object]) -> None:
        """From now on, call `stop` with the signal's name; at once if a signal came before."""
        self._on_signal = stop
        if self._received is not None:
            stop(self._received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        if number == signal.SIGHUP:
            self._detach_closed_terminals()
        self._received = signal.Signals(number).name
        self._on_signal(self._received)

    def _detach_closed_terminals(self) -> None:
        """Send output to /dev/null where its terminal is gone: a write there would fail before the snapshot."""
        closed = [descriptor for descriptor in self._terminals if not os.isatty(descriptor)]
        if not closed:
            return
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in closed:
            os.dup2(null, descriptor)
        os.close(null)


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _exit_cleanly(name: str) -> None:
    del name
    os._exit(0)  # not an exception: modules that are being imported may catch any


def _raise_stop_early(name: str) -> None:
    raise StopEarly(name)
