"""The daemon as a process: stop signals, the service manager, freed memory, and failures that it outlasts.

Imports nothing heavy, so that signal handlers are installed before the imports that take seconds.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from types import FrameType, MappingProxyType
from typing import Any, Self

from streamlearn.errors import StreamlearnError, without_credentials
from streamlearn.events import Event, get_logger
from streamlearn.status import Phase, Status

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopEarly(BaseException):  # not an Exception: like KeyboardInterrupt it must pass every handler on its way
    """A stop signal arrived while components were opened, before the loop."""


class StopSignals:
    """Handlers of SIGTERM, SIGINT and SIGHUP. What the first signal does depends on the phase.

    1. While modules are imported, nothing is open or written yet: the process exits 0 at once.
    2. While components are opened (`raise_on_signal` was called), StopEarly is raised, so that they are closed again.
    3. While the loop runs (`call_on_signal` was called), it ends after its step, with a snapshot. If an earlier
       StopEarly was lost (Python drops exceptions raised in a finalizer), it ends at once.

    A second SIGTERM or SIGINT ends the process at once, without a snapshot. A second SIGHUP is ignored: a terminal that
    is closed may send two, one from the shell and one from the kernel.
    """

    def __init__(self) -> None:
        self._on_signal: Callable[[str], object] = _exit_cleanly  # 1.
        self._received: str | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block. A SIGHUP that is ignored stays ignored, as nohup(1) expects."""
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
        self._received = signal.Signals(number).name
        self._on_signal(self._received)


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _exit_cleanly(name: str) -> None:
    del name
    os._exit(0)  # not an exception: modules that are being imported may catch any


def _raise_stop_early(name: str) -> None:
    raise StopEarly(name)


# Notifications to the service manager (sd_notify(3)): readiness, status, watchdog and stop.
#
#     READY=1      the backbone is loaded, the position is set, the first record is about to be read
#     STATUS=      one line for `systemctl status`, at most every five seconds
#     WATCHDOG=1   the loop is alive; sent by the loop's own thread, so it stops if a step hangs, even if HTTP answers
#     STOPPING=1   the last snapshot is being written
#
# Nothing is sent without NOTIFY_SOCKET. When the watchdog expires, systemd sends SIGABRT and the interpreter writes the
# stack of every thread to standard error (`dump_stacks_on_abort`).


STATUS_EVERY_S = 5.0
_BEATS = 4  # notifications per watchdog interval; systemd recommends at least two
_MICROSECONDS = 1e6

_log = get_logger("daemon")


class ServiceManager:
    """Sender to NOTIFY_SOCKET. Called at every publication and heartbeat; most calls send nothing."""

    def __init__(
        self, address: str | None, *, watchdog_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._ready = False
        self._status_line = ""
        self._phase: Phase | None = None
        self._status_at = self._beat_at = float("-inf")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """From the variables that systemd sets.

        The watchdog of another process (WATCHDOG_PID) is not served, but for that of torchrun, of which this is a rank.
        """
        served = os.getppid() if "TORCHELASTIC_RUN_ID" in environ else os.getpid()
        ours = environ.get("WATCHDOG_PID", str(served)) == str(served)
        interval = environ.get("WATCHDOG_USEC", "")
        watchdog_s = int(interval) / _MICROSECONDS if ours and interval.isdigit() else None
        return cls(environ.get("NOTIFY_SOCKET") or None, watchdog_s=watchdog_s)

    def on_publish(self, status: Status) -> None:
        """Send what is due after a publication or a heartbeat of the loop."""
        if self._address is None:
            return
        now, lines = self._clock(), []
        if status.ready and not self._ready:
            self._ready = True
            lines.append("READY=1")
        if status.phase is Phase.STOPPING and self._phase is not Phase.STOPPING:
            lines.append("STOPPING=1")
        text = one_line(status)
        if text != self._status_line and (status.phase is not self._phase or now - self._status_at >= STATUS_EVERY_S):
            self._status_line, self._status_at = text, now
            lines.append(f"STATUS={text}")
        self._phase = status.phase
        if self._watchdog_s is not None and now - self._beat_at >= self._watchdog_s / _BEATS:
            self._beat_at = now
            lines.append("WATCHDOG=1")
        if lines:
            self._send("\n".join(lines))

    def _send(self, text: str) -> None:
        assert self._address is not None
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.connect(address)
                sender.send(text.encode())
        except OSError as error:  # training goes on; without notifications the manager's watchdog ends the process
            _log.warning(Event.SERVICE_MANAGER_UNREACHABLE, address=self._address, error=str(error))


def one_line(status: Status) -> str:
    """The status as one line for `systemctl status`."""
    if status.phase in (Phase.STARTING, Phase.RESTORING, Phase.STOPPING, Phase.FAILED):
        return f"{status.phase}: {status.reason}".replace("\n", " ")
    lags = [partition.lag for partition in status.partitions]
    known = [lag for lag in lags if lag is not None]
    parts = [
        f"{status.phase}: step {status.step}",
        f"{status.records_trained} records",
        f"{status.tokens_per_s:.0f} tokens/s",
        f"lag {sum(known) if known and len(known) == len(lags) else 'unknown'}",
        f"{len(status.adaptation.regimes)} regimes",
        f"snapshot {status.snapshot.name}" if status.snapshot else "no snapshot yet",
    ]
    if status.faults:
        parts.append(f"DEGRADED: {status.faults}".replace("\n", " "))
    if status.records_dead_lettered:
        parts.append(f"{status.records_dead_lettered} dead letters")
    return ", ".join(parts)


@contextmanager
def thread_failures_to(note: Callable[[str, str], object]) -> Iterator[None]:
    """Inside the block, `note` the name of each thread that an error ends, and the error."""

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not issubclass(failed.exc_type, SystemExit):
            error = without_credentials(f"{failed.exc_type.__name__}: {failed.exc_value}")
            note(failed.thread.name if failed.thread is not None else "unknown", error)
        before(failed)

    before, threading.excepthook = threading.excepthook, hook
    try:
        yield
    finally:
        threading.excepthook = before


@cache
def versions() -> Mapping[str, str]:
    """Versions of the packages that decide what a step computes."""
    return MappingProxyType(
        {name: version(name) for name in ("streamlearn", "torch", "transformers", "peft", "kafka-python")}
    )


def dump_stacks_on_abort() -> None:
    """Write every thread's stack to standard error on SIGABRT and on fatal signals."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


# Records differ in length, so tensors have other sizes in each step, and glibc keeps freed memory in pieces: with 56
# regimes on the bundled model 2.3 GB were resident and 1.3 GB in use. Because of limits such as systemd's `MemoryMax`,
# it is returned to the system after each snapshot and after loading. Memory that a step frees is kept for the next one,
# which is faster, unless `return_freed_tensors` was called.


TENSOR_BYTES = 1 << 20
"""Size from which memory is mapped from the system, and returned when it is freed."""
_MMAP_THRESHOLD = -3
"""mallopt's number of the size; setting it also ends glibc's adjustment of it, up to 32 MiB, to what was freed."""


def return_freed_memory() -> None:
    """Give freed heap memory back to the system (glibc's `malloc_trim`; a no-op elsewhere). Takes milliseconds."""
    if trim := _glibc("malloc_trim"):
        trim(0)


def return_freed_tensors() -> None:
    """From now on, give a large tensor's memory back when it is freed (glibc only).

    With activation checkpointing a step then takes 1,461 MiB instead of 2,415, and a quarter more processor time,
    because the system clears the memory of each new tensor (SmolLM2 in float32, 2,048 tokens; n = 1).
    """
    if mallopt := _glibc("mallopt"):
        mallopt(_MMAP_THRESHOLD, TENSOR_BYTES)


def _glibc(function: str) -> Any:
    """A function that only glibc has; None elsewhere."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None


class Degradation:
    """Failures that the daemon tolerates for a while, by what failed and since when.

    >>> degradation = Degradation(60.0)
    >>> degradation.failed("snapshot", StreamlearnError("no room"))
    >>> degradation.reason
    'snapshot: no room'
    >>> degradation.recovered("snapshot")
    >>> degradation.reason
    ''
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A failure that lasts for `limit_s` ends the process."""
        self._limit_s = limit_s
        self._clock = clock
        self._since: dict[str, float] = {}
        self._messages: dict[str, str] = {}

    @property
    def reason(self) -> str:
        """Failures and their messages, for people; empty when there are none."""
        return "; ".join(f"{what}: {message}" for what, message in sorted(self._messages.items()))

    def failed(self, what: str, error: StreamlearnError) -> None:
        """Note a failure, new or repeated; only a new message is logged.

        Raises:
            StreamlearnError: `error` itself, when `what` has been failing for too long.
        """
        now = self._clock()
        since = self._since.setdefault(what, now)
        if now - since >= self._limit_s:
            raise error
        if self._messages.get(what) != str(error):
            remaining_s = round(self._limit_s - (now - since))
            _log.error(Event.DEGRADATION_STARTED, what=what, error=str(error), gives_up_in_s=remaining_s)
        self._messages[what] = str(error)

    def recovered(self, what: str) -> None:
        """Note that it works; nothing happens when it never failed."""
        since = self._since.pop(what, None)
        if since is not None:
            del self._messages[what]
            _log.info(Event.DEGRADATION_ENDED, what=what, lasted_s=round(self._clock() - since, 1))
