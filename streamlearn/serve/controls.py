"""The controls over HTTP. The loop applies each between two steps; the response follows once it is durable."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from streamlearn.controls import VERBS, AuditLog, Control, Requester, Result, Scope, Verb
from streamlearn.errors import SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.jobs import queue
from streamlearn.jobs.queue import ControlJob, ControlResult, JobQueue, QueueClosedError
from streamlearn.serve.errors import require_ready, wait_for_result
from streamlearn.serve.models import CONTROL_ERRORS, RenameRequest, RollbackRequest
from streamlearn.status import Board

MAX_ARGUMENT_CHARS = 100
_log = get_logger("serve")

_ARGUMENTS: dict[Scope, dict[str, Any]] = {
    Scope.RUN: {},
    Scope.SNAPSHOT: {"snapshot": Annotated[str, Path(description="Name of a snapshot.", max_length=40)]},
    Scope.REGIME: {"number": Annotated[int, Path(description="Number of a regime.", ge=1, lt=1 << 63)]},
}
_BODIES: dict[str, tuple[Any, Any]] = {
    "rollback": (RollbackRequest | None, None),
    "rename": (RenameRequest, inspect.Parameter.empty),
}
"""Type and default of the body, by verb."""


def requester(request: Request) -> Requester:
    peer = request.client.host if request.client is not None else None
    return Requester.from_request(peer, token=True, agent=request.headers.get("user-agent", ""))


def control_routes(board: Board, jobs: JobQueue, audit: AuditLog, deadline_s: float) -> APIRouter:
    """A route for each of `VERBS`.

    A control that the loop begins gets its lines in the audit log from the loop. All others that have the token get
    theirs here: an unknown field, a daemon that is not ready, a client that left.
    """
    routes = APIRouter(tags=["controls"], route_class=_audited(audit))

    async def run(request: Request, control: Control) -> queue.Result:
        require_ready(board)
        future = jobs.submit(ControlJob(control, requester(request)))
        request.state.begun = lambda: not future.cancelled()
        return await wait_for_result(request.receive, future, deadline_s)

    for verb in VERBS.values():
        description = verb.help if verb.body else f"{verb.help} Takes no body."
        routes.add_api_route(
            verb.route,
            _endpoint(verb, run),
            methods=["POST"],
            name=verb.name,
            response_model=ControlResult,
            summary=verb.title,
            description=description,
            responses=CONTROL_ERRORS,
        )
    return routes


Run = Callable[[Request, Control], Coroutine[Any, Any, queue.Result]]


def _endpoint(verb: Verb, run: Run) -> Callable[..., Coroutine[Any, Any, queue.Result]]:
    """The handler of a verb; FastAPI reads its arguments from its signature."""

    async def endpoint(request: Request, body: Any = None, **arguments: Any) -> queue.Result:
        fields = {} if body is None else {name: getattr(body, key) for name, key in verb.body.items()}
        return await run(request, Control(verb.name, {**arguments, **verb.defaults, **fields}))

    required = {"request": Request, **_ARGUMENTS[verb.scope]}
    parameters = [inspect.Parameter(name, _BY_NAME, annotation=kind) for name, kind in required.items()]
    if verb.name in _BODIES:
        kind, default = _BODIES[verb.name]
        parameters.append(inspect.Parameter("body", _BY_NAME, annotation=kind, default=default))
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return endpoint


_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def _audited(audit: AuditLog) -> type[APIRoute]:
    """A route that writes a line for each control that the loop does not begin."""

    class AuditedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handler(request: Request) -> Response:
                try:
                    return await handle(request)
                except Exception as error:
                    begun = getattr(request.state, "begun", lambda: False)
                    if not begun() or isinstance(error, QueueClosedError):
                        await asyncio.to_thread(_write_refusal, audit, self.name, request, _reason(error))
                    raise

            return handler

    return AuditedRoute


def _write_refusal(audit: AuditLog, verb: str, request: Request, why: str) -> None:
    """Write the line of a refused control; a failure is logged."""
    arguments = {name: str(value)[:MAX_ARGUMENT_CHARS] for name, value in request.path_params.items()}
    try:
        audit.write(verb, arguments, requester(request), Result.REFUSED, message=why)
    except SnapshotError as error:
        _log.error(Event.HTTP_FAILED, path=request.scope["path"][:MAX_ARGUMENT_CHARS], message=str(error))


def _reason(error: Exception) -> str:
    """One line for the audit log, without the values that a validation found."""
    if isinstance(error, RequestValidationError):
        return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:5])
    return f"{type(error).__name__}: {error}"[:400]
