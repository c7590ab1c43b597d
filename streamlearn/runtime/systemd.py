"""What a service manager is told (sd_notify(3)): ready, how it goes, that it still goes, and that it ends.

    READY=1      the backbone is loaded, the position is set, the first record is about to be read
    STATUS=      one line for `systemctl status`, at most every five seconds
    WATCHDOG=1   the loop turned; from the loop's own thread, so a hung step stops it, whatever HTTP still answers
    STOPPING=1   the last snapshot is being written

Without NOTIFY_SOCKET nobody is told. When the watchdog bites, systemd sends SIGABRT and the interpreter writes the
stack of every thread to standard error (`dump_stacks_on_abort`).
"""

import faulthandler
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

from streamlearn.events import Event, get_logger
from streamlearn.status.status import Phase, Status

STATUS_EVERY_S = 5.0
_BEATS = 4  # signs of life in one interval of the watchdog
_MICROSECONDS = 1e6

_log = get_logger("daemon")


class ServiceManager:
    """The other end of NOTIFY_SOCKET. Called at every publication and heartbeat, so most calls send nothing."""

    def __init__(
        self, address: str | None, *, watchdog_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._ready = False
        self._said = ""
        self._phase: Phase | None = None
        self._said_at = self._beat_at = float("-inf")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """As systemd started this process; a WATCHDOG_PID that is another's is not ours to feed."""
        ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        interval = environ.get("WATCHDOG_USEC", "")
        watchdog_s = int(interval) / _MICROSECONDS if ours and interval.isdigit() else None
        return cls(environ.get("NOTIFY_SOCKET") or None, watchdog_s=watchdog_s)

    def on_publish(self, status: Status) -> None:
        """The loop published this, or said again that it turns."""
        if self._address is None:
            return
        now, lines = self._clock(), []
        if status.ready and not self._ready:
            self._ready = True
            lines.append("READY=1")
        if status.phase is Phase.STOPPING and self._phase is not Phase.STOPPING:
            lines.append("STOPPING=1")
        text = one_line(status)
        if text != self._said and (status.phase is not self._phase or now - self._said_at >= STATUS_EVERY_S):
            self._said, self._said_at = text, now
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
        except (
            OSError
        ) as error:  # a manager that does not listen ends us by its own watchdog; learning goes on till then
            _log.warning(Event.SERVICE_MANAGER_UNREACHABLE, address=self._address, error=str(error))


def one_line(status: Status) -> str:
    """The status for people."""
    if status.phase in (Phase.STARTING, Phase.RESTORING, Phase.STOPPING, Phase.FAILED):
        return f"{status.phase}: {status.reason}".replace("\n", " ")
    lag = [partition.lag for partition in status.partitions]
    known = [each for each in lag if each is not None]
    parts = [
        f"{status.phase}: step {status.step}",
        f"{status.records_trained} records",
        f"{status.tokens_per_s:.0f} tokens/s",
        f"lag {sum(known) if known and len(known) == len(lag) else 'unknown'}",
        f"{len(status.adaptation.regimes)} regimes",
        f"snapshot {status.snapshot.name}" if status.snapshot else "no snapshot yet",
    ]
    if status.degraded:
        parts.append(f"DEGRADED: {status.degraded}".replace("\n", " "))
    if status.records_dead_lettered:
        parts.append(f"{status.records_dead_lettered} dead letters")
    return ", ".join(parts)


def dump_stacks_on_abort() -> None:
    """From now on SIGABRT and fatal signals write every thread's stack to standard error before the process dies."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
