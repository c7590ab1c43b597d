"""Controls that HTTP refuses before the loop learns of them, in the audit log.

The loop writes the lines of every control that it begins; see `AuditLog`. What never gets there (no token, an unknown
field, a daemon that is not ready, a client that left) is written here. Without the token anyone on the machine can ask,
so those lines are limited: at most `MAX_PER_MINUTE`, and the next line says how many were left out.
"""

import threading
from collections.abc import Callable

from starlette.requests import Request

from streamlearn.controls.audit_log import AuditLog, Result
from streamlearn.controls.requester import Requester
from streamlearn.errors import SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.serve.control_paths import control_of

MAX_PER_MINUTE = 30
_MINUTE_S = 60.0
_MAX_PATH_CHARS = 100
_log = get_logger("serve")


def requester(request: Request, *, token: bool) -> Requester:
    """Who sends a request."""
    peer = request.client.host if request.client is not None else None
    return Requester.of_request(peer, token=token, agent=request.headers.get("user-agent", ""))


class Refusals:
    """Writes the lines of refused controls. Thread-safe; blocks until the line is durable."""

    def __init__(self, audit: AuditLog, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, in seconds."""
        self._audit = audit
        self._clock = clock
        self._lock = threading.Lock()
        self._since = float("-inf")
        self._written = 0
        self._left_out = 0

    def write(self, request: Request, why: str, *, token: bool) -> None:
        """Write the line of a refused request, if it asked for a control. A failure is logged."""
        asked = control_of(request.method, request.scope["path"])
        if asked is None:
            return
        with self._lock:
            if not token and not self._admit():
                return
            left_out, self._left_out = self._left_out, 0
        message = f"{why} ({left_out} lines were left out before this one)" if left_out else why
        try:
            self._audit.write(*asked, requester(request, token=token), Result.REFUSED, message=message)
        except SnapshotError as error:
            _log.error(Event.HTTP_FAILED, path=request.scope["path"][:_MAX_PATH_CHARS], message=str(error))

    def without_token(self, request: Request, why: str) -> None:
        """Write the line of a request that lacked the token."""
        self.write(request, why, token=False)

    def _admit(self) -> bool:
        now = self._clock()
        if now - self._since >= _MINUTE_S:
            self._since, self._written = now, 0
        self._written += 1
        admitted = self._written <= MAX_PER_MINUTE
        self._left_out += not admitted
        return admitted
