"""What `watch` knows about a daemon: the newest answers, and since when there are none."""

import time
from collections.abc import Callable

import orjson

from streamlearn.commands.client import Endpoint
from streamlearn.commands.history_copy import HistoryCopy
from streamlearn.errors import SourceError
from streamlearn.serve.views import RegimesView, ShiftsView, StatusView

TIMEOUT_S = 5.0  # an answer takes milliseconds; a busy machine may delay it a few hundred times
REGIMES_EVERY_S = 10.0  # with many regimes this answer is the longest, and hold-out scores change slowly
_ADVICE = "start it with `streamlearn run`, or read its log"


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
            UsageError: it refuses to.
        """
        status = StatusView.model_validate(self._get("/v1/status"))
        self.history.update(self.endpoint.request(self.history.path, advice=_ADVICE, timeout_s=TIMEOUT_S))
        if self._is_due(status):
            self.regimes = RegimesView.model_validate(self._get("/v1/regimes"))
            self.shifts = ShiftsView.model_validate(self._get("/v1/shifts"))
            self._asked_at = self._clock()
        self.status = status
        self.fault, self._away_since = "", None

    def ask_if_there(self) -> None:
        """Get what changed, or note that the daemon is away.

        Raises:
            UsageError: it refuses to answer.
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

    def _get(self, path: str) -> object:
        return orjson.loads(self.endpoint.request(path, advice=_ADVICE, timeout_s=TIMEOUT_S))
