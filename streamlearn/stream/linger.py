"""The linger: how long records that fill no batch wait for the next ones."""

from collections.abc import Callable


class Linger:
    """Measures for how long polls have returned nothing.

    Only waiting counts: the time starts with the first poll that returns nothing, not with the last record, since a
    long step may lie between them.
    """

    def __init__(self, linger_s: float | None, clock: Callable[[], float]) -> None:
        """It expires after `linger_s` seconds, never if that is None. `clock` is monotonic, in seconds."""
        self._linger_s = linger_s
        self._clock = clock
        self._since: float | None = None

    def observe_poll(self, num_records: int) -> None:
        """Note what a poll returned."""
        if num_records:
            self.restart()
        elif self._since is None:
            self._since = self._clock()

    def restart(self) -> None:
        """Begin anew with the next poll that returns nothing."""
        self._since = None

    @property
    def expired(self) -> bool:
        """Whether nothing was returned for `linger_s` seconds."""
        if self._linger_s is None or self._since is None:
            return False
        return self._clock() - self._since >= self._linger_s
