"""The controls over HTTP. Each is carried out by the loop between two steps, and answered once it is durable."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from streamlearn.controls.control import (
    ApproveRegime,
    Control,
    DropRegime,
    FreezeRegime,
    Pause,
    Pin,
    RenameRegime,
    Resume,
    RollBack,
    UnfreezeRegime,
    Unpin,
)
from streamlearn.http.replies import OrjsonResponse
from streamlearn.jobs.queue import ControlJob, JobQueue, QueueClosedError
from streamlearn.jobs.results import ControlResult
from streamlearn.serve.health import require_ready
from streamlearn.serve.json_route import OrjsonRoute
from streamlearn.serve.refusals import Refusals, requester
from streamlearn.serve.schemas import CONTROL_ERRORS, RenameRequest, RollbackRequest
from streamlearn.serve.wait import wait_for_result
from streamlearn.status.board import Board

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
