"""The board: the loop publishes its status there, and every other thread reads it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from streamlearn.status.status import Phase, Status

# The longest iteration of the loop is a step, a snapshot and the job budget, a few seconds each; ten times that.
HEARTBEAT_BOUND_S = 60.0
STARTING_BOUND_S = 600.0  # loading a backbone from a cold disk is one iteration: 16 GB at 30 MB/s


@dataclass(frozen=True, slots=True)
class Clock:
    """Monotonic and wall time, in seconds; tests pass their own."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class Board:
    """The current status. One writer, any number of readers, no locks: replacing the status is atomic.

    Every publication is also a heartbeat. While it waits or works without a change of status, the loop calls `beat`.
    """

    def __init__(
        self,
        status: Status,
        clock: Clock,
        *,
        bound_s: float = HEARTBEAT_BOUND_S,
        starting_bound_s: float = STARTING_BOUND_S,
        on_publish: Callable[[Status], None] = lambda _: None,
    ) -> None:
        """`on_publish` is called on every publication and heartbeat, in the loop's thread."""
        self._clock = clock
        self._on_publish = on_publish
        self._bound_s = bound_s
        self._starting_bound_s = starting_bound_s
        self.publish(status)

    def publish(self, status: Status) -> None:
        """Replace the status. What it refers to must not change afterwards; its mappings are copied."""
        self._last_beat = self._clock.monotonic()  # first: the new phase may have the tighter bound
        self._status = replace(
            status,
            dead_letters=MappingProxyType(dict(status.dead_letters)),
            versions=MappingProxyType(dict(status.versions)),
        )
        self._on_publish(self._status)

    def read(self) -> Status:
        """The newest status."""
        return self._status

    def beat(self) -> None:
        """Record a heartbeat without changing the status."""
        self._last_beat = self._clock.monotonic()
        self._on_publish(self._status)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last heartbeat."""
        return self._clock.monotonic() - self._last_beat

    @property
    def heartbeat_bound_s(self) -> float:
        """Maximum age of the last heartbeat in the current phase."""
        starting = self._status.phase in (Phase.STARTING, Phase.RESTORING)
        return self._starting_bound_s if starting else self._bound_s

    @property
    def alive(self) -> bool:
        """Whether the daemon has not failed and its last heartbeat is recent enough."""
        return self._status.phase is not Phase.FAILED and self.heartbeat_age_s <= self.heartbeat_bound_s

    def why_not_alive(self) -> str | None:
        """The reason for people; None while alive."""
        if self._status.phase is Phase.FAILED:
            return f"the daemon failed: {self._status.reason or 'see the log'}"
        if not self.alive:
            return (
                f"the training loop must report every {self.heartbeat_bound_s:g} s, "
                f"its last report is {self.heartbeat_age_s:.1f} s old"
            )
        return None

    def why_not_ready(self) -> str | None:
        """The reason for people; None while the daemon accepts jobs."""
        status = self._status
        not_alive = self.why_not_alive()
        if not_alive is not None:
            return not_alive
        return None if status.ready else status.reason or f"the daemon is {status.phase}"
