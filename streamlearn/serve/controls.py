"""The controls over HTTP. Each is carried out by the loop between two steps, and answered once it is durable."""

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from streamlearn.controls import (
    ApproveRegime,
    AuditLog,
    Control,
    DropRegime,
    FreezeRegime,
    Pause,
    Pin,
    RenameRegime,
    Requester,
    Result,
    Resume,
    RollBack,
    UnfreezeRegime,
    Unpin,
)
from streamlearn.errors import SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.http.guards import OrjsonResponse
from streamlearn.jobs.queue import ControlJob, JobQueue, QueueClosedError
from streamlearn.jobs.results import ControlResult
from streamlearn.serve.errors import OrjsonRoute, wait_for_result
from streamlearn.serve.health import require_ready
from streamlearn.serve.models import CONTROL_ERRORS, RenameRequest, RollbackRequest
from streamlearn.status import Board

_PATHS = re.compile(
    r"/v1/(?:(?P<run>pause|resume)"
    r"|snapshots/(?P<name>[^/]+)/(?P<snapshot>pin|unpin|rollback)"
    r"|regimes/(?P<number>[^/]+)/(?P<regime>freeze|unfreeze|rename|approve|drop))"
)
MAX_ARGUMENT_CHARS = 100


def control_of(method: str, path: str) -> tuple[str, dict[str, str]] | None:
    """Return the control that a request asks for and the argument in its path; None if it asks for none.

    >>> control_of("POST", "/v1/snapshots/00000042/pin")
    ('pin', {'snapshot': '00000042'})
    >>> control_of("GET", "/v1/pause") is None
    True
    """
    found = _PATHS.fullmatch(path) if method == "POST" else None
    if found is None:
        return None
    if found["run"]:
        return found["run"], {}
    kind, value = ("snapshot", found["name"]) if found["snapshot"] else ("number", found["number"])
    return found["snapshot"] or found["regime"], {kind: value[:MAX_ARGUMENT_CHARS]}


# Controls that HTTP refuses before the loop learns of them, in the audit log.
#
# The loop writes the lines of every control that it begins; see `AuditLog`. What never gets there (no token, an unknown
# field, a daemon that is not ready, a client that left) is written here. Without the token anyone on the machine can
# ask, so those lines are limited: at most `MAX_PER_MINUTE`, and the next line says how many were left out.


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


_Name = Annotated[str, Path(description="Name of a snapshot.", max_length=40)]
_Number = Annotated[int, Path(description="Number of a regime.", ge=1, lt=1 << 63)]


_Endpoint = Callable[..., Coroutine[Any, Any, Response]]


class ControlRoutes:
    """The routes of all controls, in `router`."""

    def __init__(self, board: Board, jobs: JobQueue, refusals: Refusals, deadline_s: float) -> None:
        self._board = board
        self._jobs = jobs
        self._deadline_s = deadline_s
        self.router = APIRouter(tags=["controls"], route_class=_audited(refusals))
        self._add_run_controls()
        self._add_snapshot_controls()
        self._add_regime_controls()

    async def _run(self, request: Request, control: Control) -> Response:
        require_ready(self._board)
        future = self._jobs.submit(ControlJob(control, requester(request, token=True)))
        request.state.begun = lambda: not future.cancelled()
        return OrjsonResponse(await wait_for_result(request.receive, future, self._deadline_s))

    def _post(self, path: str, summary: str) -> Callable[[_Endpoint], _Endpoint]:
        return self.router.post(path, response_model=ControlResult, summary=summary, responses=CONTROL_ERRORS)

    def _add_run_controls(self) -> None:
        @self._post("/v1/pause", "Pause")
        async def pause(request: Request) -> Response:
            """Take no step and read no record until resumed, also after a restart. Jobs are served. Takes no body."""
            return await self._run(request, Pause())

        @self._post("/v1/resume", "Resume")
        async def resume(request: Request) -> Response:
            """Go on after a pause. Takes no body."""
            return await self._run(request, Resume())

    def _add_snapshot_controls(self) -> None:
        @self._post("/v1/snapshots/{name}/pin", "Pin a snapshot")
        async def pin(request: Request, name: _Name) -> Response:
            """Never prune this snapshot. Takes no body."""
            return await self._run(request, Pin(name))

        @self._post("/v1/snapshots/{name}/unpin", "Unpin a snapshot")
        async def unpin(request: Request, name: _Name) -> Response:
            """Let this snapshot be pruned again. Takes no body."""
            return await self._run(request, Unpin(name))

        @self._post("/v1/snapshots/{name}/rollback", "Roll back")
        async def roll_back(request: Request, name: _Name, body: RollbackRequest | None = None) -> Response:
            """Go on from this snapshot; newer ones are moved aside. Skipped records become dead letters."""
            return await self._run(request, RollBack(name, body.skip_records if body is not None else ()))

    def _add_regime_controls(self) -> None:
        @self._post("/v1/regimes/{number}/freeze", "Freeze a regime")
        async def freeze(request: Request, number: _Number) -> Response:
            """Train no more on this regime's records. Takes no body."""
            return await self._run(request, FreezeRegime(number))

        @self._post("/v1/regimes/{number}/unfreeze", "Unfreeze a regime")
        async def unfreeze(request: Request, number: _Number) -> Response:
            """Train on this regime's records again. Takes no body."""
            return await self._run(request, UnfreezeRegime(number))

        @self._post("/v1/regimes/{number}/rename", "Rename a regime")
        async def rename(request: Request, number: _Number, body: RenameRequest) -> Response:
            """Give this regime a name."""
            return await self._run(request, RenameRegime(number, body.name))

        @self._post("/v1/regimes/{number}/approve", "Approve a regime")
        async def approve(request: Request, number: _Number) -> Response:
            """Publish what this regime learned although its answers changed. Takes no body."""
            return await self._run(request, ApproveRegime(number))

        @self._post("/v1/regimes/{number}/drop", "Drop a regime")
        async def drop(request: Request, number: _Number) -> Response:
            """Forget this regime and its adapter. Takes no body."""
            return await self._run(request, DropRegime(number))


def _audited(refusals: Refusals) -> type[OrjsonRoute]:
    """A route that writes a line for each control that the loop does not begin."""

    class AuditedRoute(OrjsonRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handler(request: Request) -> Response:
                try:
                    return await handle(request)
                except Exception as error:
                    begun = getattr(request.state, "begun", lambda: False)
                    if not begun() or isinstance(error, QueueClosedError):
                        await asyncio.to_thread(refusals.write, request, _reason(error), token=True)
                    raise

            return handler

    return AuditedRoute


def _reason(error: Exception) -> str:
    """One line for the audit log, without the values that a validation found."""
    if isinstance(error, RequestValidationError):
        return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:5])
    return f"{type(error).__name__}: {error}"[:400]
