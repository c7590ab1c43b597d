"""The controls over HTTP. Each is carried out by the loop between two steps, and answered once it is durable."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from streamlearn.controls import (
    ApproveRegime,
    Control,
    DropRegime,
    FreezeRegime,
    Pause,
    Pin,
    RenameRegime,
    Requester,
    Resume,
    RollBack,
    UnfreezeRegime,
    Unpin,
)
from streamlearn.jobs.queue import ControlJob, ControlResult, JobQueue
from streamlearn.serve.errors import wait_for_result
from streamlearn.serve.health import require_ready
from streamlearn.serve.models import CONTROL_ERRORS, RenameRequest, RollbackRequest
from streamlearn.status import Board


def requester(request: Request) -> Requester:
    """Who sends a request that has the token."""
    peer = request.client.host if request.client is not None else None
    return Requester.of_request(peer, token=True, agent=request.headers.get("user-agent", ""))


_Name = Annotated[str, Path(description="Name of a snapshot.", max_length=40)]
_Number = Annotated[int, Path(description="Number of a regime.", ge=1, lt=1 << 63)]


_Endpoint = Callable[..., Coroutine[Any, Any, ControlResult]]


class ControlRoutes:
    """The routes of all controls, in `router`."""

    def __init__(self, board: Board, jobs: JobQueue, deadline_s: float) -> None:
        self._board = board
        self._jobs = jobs
        self._deadline_s = deadline_s
        self.router = APIRouter(tags=["controls"])
        self._add_run_controls()
        self._add_snapshot_controls()
        self._add_regime_controls()

    async def _run(self, request: Request, control: Control) -> ControlResult:
        require_ready(self._board)
        future = self._jobs.submit(ControlJob(control, requester(request)))
        result = await wait_for_result(request.receive, future, self._deadline_s)
        assert isinstance(result, ControlResult)
        return result

    def _post(self, path: str, summary: str) -> Callable[[_Endpoint], _Endpoint]:
        return self.router.post(path, summary=summary, responses=CONTROL_ERRORS)

    def _add_run_controls(self) -> None:
        @self._post("/v1/pause", "Pause")
        async def pause(request: Request) -> ControlResult:
            """Take no step and read no record until resumed, also after a restart. Jobs are served. Takes no body."""
            return await self._run(request, Pause())

        @self._post("/v1/resume", "Resume")
        async def resume(request: Request) -> ControlResult:
            """Go on after a pause. Takes no body."""
            return await self._run(request, Resume())

    def _add_snapshot_controls(self) -> None:
        @self._post("/v1/snapshots/{name}/pin", "Pin a snapshot")
        async def pin(request: Request, name: _Name) -> ControlResult:
            """Never prune this snapshot. Takes no body."""
            return await self._run(request, Pin(name))

        @self._post("/v1/snapshots/{name}/unpin", "Unpin a snapshot")
        async def unpin(request: Request, name: _Name) -> ControlResult:
            """Let this snapshot be pruned again. Takes no body."""
            return await self._run(request, Unpin(name))

        @self._post("/v1/snapshots/{name}/rollback", "Roll back")
        async def roll_back(request: Request, name: _Name, body: RollbackRequest | None = None) -> ControlResult:
            """Go on from this snapshot; newer ones are moved aside. Skipped records become dead letters."""
            return await self._run(request, RollBack(name, body.skip_records if body is not None else ()))

    def _add_regime_controls(self) -> None:
        @self._post("/v1/regimes/{number}/freeze", "Freeze a regime")
        async def freeze(request: Request, number: _Number) -> ControlResult:
            """Train no more on this regime's records. Takes no body."""
            return await self._run(request, FreezeRegime(number))

        @self._post("/v1/regimes/{number}/unfreeze", "Unfreeze a regime")
        async def unfreeze(request: Request, number: _Number) -> ControlResult:
            """Train on this regime's records again. Takes no body."""
            return await self._run(request, UnfreezeRegime(number))

        @self._post("/v1/regimes/{number}/rename", "Rename a regime")
        async def rename(request: Request, number: _Number, body: RenameRequest) -> ControlResult:
            """Give this regime a name."""
            return await self._run(request, RenameRegime(number, body.name))

        @self._post("/v1/regimes/{number}/approve", "Approve a regime")
        async def approve(request: Request, number: _Number) -> ControlResult:
            """Publish what this regime learned although its answers changed. Takes no body."""
            return await self._run(request, ApproveRegime(number))

        @self._post("/v1/regimes/{number}/drop", "Drop a regime")
        async def drop(request: Request, number: _Number) -> ControlResult:
            """Forget this regime and its adapter. Takes no body."""
            return await self._run(request, DropRegime(number))
