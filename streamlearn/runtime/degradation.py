"""What cannot be written at present. The loop continues and says so, up to a time limit per failure."""

import time
from collections.abc import Callable

from streamlearn.errors import StreamlearnError
from streamlearn.events import Event, get_logger

_log = get_logger("daemon")


class Degradation:
    """Failures that the daemon outlasts for a while, by what failed and since when.

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
        """What fails and why, for people; empty when nothing does."""
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
