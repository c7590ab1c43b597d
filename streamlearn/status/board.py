"""Where the loop publishes its status and every other thread reads it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from streamlearn.status.status import Phase, Status

HEARTBEAT_BOUND_S = (
    60.0  # the longest turn of the loop: a step, a snapshot and the job budget, each a few seconds, x 10
)
STARTING_BOUND_S = 600.0  # loading a backbone from a cold disk is one turn: 16 GB at 30 MB/s


@dataclass(frozen=True, slots=True)
class Clock:
    """Both kinds of time, in seconds; tests pass their own."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class Board:
    """Where the loop publishes and everyone else reads. One writer, any number of readers, no locks: a swap is atomic.

    A publication is a heartbeat. A loop that waits or works without anything new to say calls `beat`.
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
        """`heed` hears every publication and heartbeat, in the thread of the loop."""
        self._clock = clock
        self._on_publish = on_publish
        self._bound_s = bound_s
        self._starting_bound_s = starting_bound_s
        self.publish(status)

    def publish(self, status: Status) -> None:
        """Replace the status; what it holds must not change afterwards."""
        self._beat = self._clock.monotonic()  # first: the new phase may have the tighter bound
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
        """Say that the loop turns."""
        self._beat = self._clock.monotonic()
        self._on_publish(self._status)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the loop last said that it turns."""
        return self._clock.monotonic() - self._beat

    @property
    def heartbeat_bound_s(self) -> float:
        """Seconds that the loop may be silent in this phase."""
        starting = self._status.phase in (Phase.STARTING, Phase.RESTORING)
        return self._starting_bound_s if starting else self._bound_s

    @property
    def alive(self) -> bool:
        """Whether the loop turns and has not given up."""
        return self._status.phase is not Phase.FAILED and self.heartbeat_age_s <= self.heartbeat_bound_s

    def why_not_alive(self) -> str | None:
        """For people; None while alive."""
        if self._status.phase is Phase.FAILED:
            return f"the daemon failed: {self._status.reason or 'the log says why'}"
        if not self.alive:
            return (
                f"the training loop must report every {self.heartbeat_bound_s:g} s, "
                f"its last report is {self.heartbeat_age_s:.1f} s old"
            )
        return None

    def why_not_ready(self) -> str | None:
        """For people; None while jobs are taken."""
        status = self._status
        stalled = self.why_not_alive()
        if stalled is not None:
            return stalled
        return None if status.ready else status.reason or f"the daemon is {status.phase}"
