"""What `watch` knows about a daemon: the newest answers, and since when there are none."""

import time
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from streamlearn.commands.client import Endpoint, understood
from streamlearn.commands.history_copy import HistoryCopy
from streamlearn.errors import SourceError
from streamlearn.serve.views import RegimesView, ShiftsView, StatusView

TIMEOUT_S = 5.0  # an answer takes milliseconds; a busy machine may delay it a few hundred times
REGIMES_EVERY_S = 10.0  # with many regimes this answer is the longest, and hold-out scores change slowly
_ADVICE = "start it with `streamlearn run`, or read its log"

View = TypeVar("View", bound=BaseModel)


class WatchedDaemon:
    """Asks the daemon again and again; what it answered last stays while it is away."""

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint = endpoint
        self.history = HistoryCopy()
        self.status: StatusView | None = None
        self.regimes: RegimesView | None = None
        self.shifts: ShiftsView | None = None
        self.fault = ""
        """Why the daemon did not answer; empty while it does."""
        self._clock = clock
        self._away_since: float | None = None
        self._asked_at = -REGIMES_EVERY_S

    @property
    def away_s(self) -> float:
        """Seconds for which the daemon has not answered."""
        return 0.0 if self._away_since is None else self._clock() - self._away_since

    def ask(self) -> None:
        """Get what changed.

        Raises:
            SourceError: no daemon answers.
            UsageError: it refuses to, or is no daemon of this release.
        """
        status = self._get(StatusView, "/v1/status")
        history = self._request(self.history.path)
        with understood(self.endpoint.url + self.history.path):
            self.history.update(history)
        if self._is_due(status):
            self.regimes = self._get(RegimesView, "/v1/regimes")
            self.shifts = self._get(ShiftsView, "/v1/shifts")
            self._asked_at = self._clock()
        self.status = status
        self.fault, self._away_since = "", None

    def ask_if_there(self) -> None:
        """Get what changed, or note that the daemon is away.

        Raises:
            UsageError: it refuses to answer, or is no daemon of this release.
        """
        try:
            self.ask()
        except SourceError as error:
            self.fault = str(error)
            self._away_since = self._clock() if self._away_since is None else self._away_since

    def _is_due(self, status: StatusView) -> bool:
        """Whether regimes and shifts are to be asked for: at once after a shift, else now and then."""
        old = self.status
        if old is None or self._clock() - self._asked_at >= REGIMES_EVERY_S:
            return True
        return (old.num_shifts, old.current_regime) != (status.num_shifts, status.current_regime)

    def _get(self, view: type[View], path: str) -> View:
        answer = self._request(path)
        with understood(self.endpoint.url + path):
            return view.model_validate_json(answer)

    def _request(self, path: str) -> bytes:
        return self.endpoint.request(path, advice=_ADVICE, timeout_s=TIMEOUT_S)
