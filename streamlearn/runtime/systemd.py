"""Notifications to the service manager (sd_notify(3)): readiness, status, watchdog and stop.

    READY=1      the backbone is loaded, the position is set, the first record is about to be read
    STATUS=      one line for `systemctl status`, at most every five seconds
    WATCHDOG=1   the loop is alive; sent by the loop's own thread, so it stops if a step hangs, even if HTTP answers
    STOPPING=1   the last snapshot is being written

Nothing is sent without NOTIFY_SOCKET. When the watchdog expires, systemd sends SIGABRT and the interpreter writes the
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
    if status.degraded:
        parts.append(f"DEGRADED: {status.degraded}".replace("\n", " "))
    if status.records_dead_lettered:
        parts.append(f"{status.records_dead_lettered} dead letters")
    return ", ".join(parts)


def dump_stacks_on_abort() -> None:
    """Write every thread's stack to standard error on SIGABRT and on fatal signals."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
