"""What cannot be written at present: the loop goes on, says so, and gives up before it would have to for ever."""

import time
from collections.abc import Callable

from streamlearn.errors import StreamlearnError
from streamlearn.events import Event, get_logger

_log = get_logger("daemon")


class Degradation:
    """Failures by what failed, each since when.

    >>> degradation = Degradation(60.0)
    >>> degradation.met("snapshot", StreamlearnError("no room"))
    >>> degradation.reason
    'snapshot: no room'
    >>> degradation.over("snapshot")
    >>> degradation.reason
    ''
    """

    def __init__(self, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Whatever fails for `bound_s` ends the process."""
        self._bound_s = bound_s
        self._clock = clock
        self._since: dict[str, float] = {}
        self._said: dict[str, str] = {}

    @property
    def reason(self) -> str:
        """For people; empty when all is well."""
        return "; ".join(f"{what}: {said}" for what, said in sorted(self._said.items()))

    def met(self, what: str, error: StreamlearnError) -> None:
        """It failed, for the first time or again. Only what is new is logged.

        Raises:
            StreamlearnError: `error` itself, when it has been failing for too long.
        """
        now = self._clock()
        since = self._since.setdefault(what, now)
        if now - since >= self._bound_s:
            raise error
        if self._said.get(what) != str(error):
            _log.error(
                Event.DEGRADATION_STARTED, what=what, error=str(error), gives_up_in_s=round(self._bound_s - now + since)
            )
        self._said[what] = str(error)

    def over(self, what: str) -> None:
        """It worked."""
        since = self._since.pop(what, None)
        if since is not None:
            del self._said[what]
            _log.info(Event.DEGRADATION_ENDED, what=what, lasted_s=round(self._clock() - since, 1))
