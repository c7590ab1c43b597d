"""The endpoints. A handler reads the board, or queues a job and waits for its result; it never accesses the model."""

import asyncio
import hashlib
import inspect
import math
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi import Path as PathArgument
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.responses import Response

from streamlearn import __version__, controls
from streamlearn.board import Board, Clock
from streamlearn.controls import VERBS, AuditLog, Control, Requester, Scope, Verb
from streamlearn.errors import SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.http.guards import SAFE_METHODS, Defaults, guards
from streamlearn.http.responses import ApiError, unavailable
from streamlearn.jobs.queue import (
    ControlJob,
    ControlResult,
    EvalJob,
    EvalResult,
    Job,
    JobQueue,
    PromptInput,
    QueueClosedError,
    Result,
    RouteJob,
    RouteResult,
    SnapshotJob,
    SnapshotResult,
)
from streamlearn.serve import metrics
from streamlearn.serve.errors import (
    RETRY_AFTER_S,
    install_error_handlers,
    require_at_most,
    require_ready,
    wait_for_result,
)
from streamlearn.serve.models import (
    CONTROL_ERRORS,
    JOB_ERRORS,
    ErrorBody,
    EvalRequest,
    ExpertsView,
    HistoryBody,
    HistoryView,
    JobsView,
    Liveness,
    PromptRequest,
    PublicationView,
    Readiness,
    RegimesView,
    RenameRequest,
    RollbackRequest,
    RouteRequest,
    ShiftsView,
    SnapshotList,
    SnapshotRow,
    StatusView,
    publication_view,
    regimes_view,
    shifts_view,
    status_view,
)
from streamlearn.serve.openai import openai_routes
from streamlearn.serve.openai_schemas import DEFAULT_NAME
from streamlearn.settings import ServeSettings
from streamlearn.settings.faults import in_words

_log = get_logger("serve")

# The largest request would take 2048 s: 1024 examples at one per second, with half the time left to training. Clients
# split such requests.
JOB_DEADLINE_S = 600.0

_DESCRIPTION = """Progress of a continual learner, its regimes and shifts, and evaluation of the current model.

Monitoring endpoints read a status that the training loop publishes, so they respond at once. Job endpoints (`POST`)
queue a job, which the loop runs between two training steps within its time budget; when the queue is full they return
503 with `Retry-After`. Closing the connection cancels the job. No job changes the weights.

Controls pause the daemon, pin snapshots, roll back and change regimes. The loop applies one between two training
steps, before any job, and responds once it is durable. All need the bearer token; all that begin are in the audit log.

`HEAD` works on every path that answers `GET`. The body of every error is `{"error": {"code", "message", "hint"}}`, on
the paths of OpenAI's API `{"error": {"message", "type", "param", "code"}}`."""

_Responses = dict[int | str, dict[str, Any]]


def create_app(
    board: Board,
    jobs: JobQueue,
    settings: ServeSettings,
    snapshots: Callable[[], Sequence[SnapshotRow]],
    clock: Clock,
    *,
    token: str,
    audit: AuditLog,
    model_name: str = DEFAULT_NAME,
    job_deadline_s: float = JOB_DEADLINE_S,
) -> FastAPI:
    """The application.

    Args:
        board: The status that the loop publishes.
        jobs: The queue of the loop.
        settings: Settings of the endpoint.
        snapshots: Lists the snapshots on disk; called in a worker thread.
        clock: Monotonic and wall time.
        token: The bearer token.
        audit: Gets a line for each control with the token that is refused before the loop begins it.
        model_name: Name of the model for OpenAI's clients; regimes are `NAME-regime-3`.
        job_deadline_s: Time until a job is cancelled.
    """
    app = FastAPI(
        title="streamlearn",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # both viewers load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        middleware=guards(settings, token, is_page_request),
    )
    install_error_handlers(app, retry_after_s=max(1, math.ceil(settings.queue_size * settings.eval_budget_s)))
    app.include_router(health_routes(board))
    app.include_router(_monitoring_routes(board, jobs, snapshots, clock))
    app.include_router(_job_routes(board, jobs, settings, job_deadline_s))
    app.include_router(control_routes(board, jobs, audit, job_deadline_s))
    app.include_router(openai_routes(board, jobs, settings, clock, model_name, job_deadline_s))
    app.include_router(page_routes(lambda: _list_endpoints(app)))
    _document_limits(app, settings)
    return app


def _document_limits(app: FastAPI, settings: ServeSettings) -> None:
    """Add the configured limits to the OpenAPI document."""
    schemas = app.openapi()["components"]["schemas"]
    schemas["EvalRequest"]["properties"]["examples"]["maxItems"] = settings.max_examples
    schemas["RouteRequest"]["properties"]["prompts"]["maxItems"] = settings.max_examples
    for name, field in (
        ("EvalRequest", "max_new_tokens"),
        ("TextCompletionRequest", "max_tokens"),
        ("ChatCompletionRequest", "max_tokens"),
        ("ChatCompletionRequest", "max_completion_tokens"),
    ):
        _limit(schemas[name], field, settings.max_new_tokens)


def _limit(schema: dict[str, Any], field: str, maximum: int) -> None:
    [number, _] = schema["properties"][field]["anyOf"]
    number["maximum"] = maximum


def _monitoring_routes(
    board: Board, jobs: JobQueue, snapshots: Callable[[], Sequence[SnapshotRow]], clock: Clock
) -> APIRouter:
    routes = APIRouter(tags=["monitoring"])
    registry = metrics.registry(board, jobs, clock)
    history = HistoryBody(board, clock)
    text: _Responses = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text format."}
    }

    @routes.get("/metrics", response_class=Response, summary="Prometheus metrics", responses=text)
    async def read_metrics() -> Response:
        """The numbers of /v1/status, and memory, CPU time and open files of the process."""
        return Response(metrics.exposition(registry), headers={"content-type": metrics.CONTENT_TYPE})

    @routes.get("/v1/status", summary="Status")
    async def read_status() -> StatusView:
        """Phase, progress, loss, position and lag per partition, newest snapshot, model, device and versions."""
        return status_view(board, JobsView(waiting=len(jobs), capacity=jobs.size), clock)

    @routes.get("/v1/regimes", summary="Regimes and forgetting")
    async def read_regimes() -> RegimesView:
        """Remembered regimes with the history of their hold-out scores, average forgetting and backward transfer."""
        return regimes_view(board.read())

    @routes.get("/v1/shifts", summary="Detected shifts")
    async def read_shifts() -> ShiftsView:
        """Shifts of the stream, oldest first: onset, test statistic, regime entered, cost and result of its probe."""
        return shifts_view(board.read())

    @routes.get("/v1/experts", summary="Routing among experts")
    async def read_experts() -> ExpertsView:
        """By regime and head: the share of tokens that each expert gets, and its routing bias, the busiest first."""
        adaptation = board.read().adaptation
        return ExpertsView(regimes=adaptation.experts, effective_regimes=adaptation.effective_regimes)

    @routes.get(
        "/v1/history",
        response_model=HistoryView,
        summary="Series along the stream",
        responses={304: {"description": "The content is that of the ETag in If-None-Match."}},
    )
    async def read_history(request: Request) -> Response:
        """Loss and the untouched backbone's, speed, lag, forgetting, dead letters and regimes along the stream."""
        return with_etag(request, history.read(), "application/json")

    @routes.get("/v1/publication", summary="Published versions")
    async def read_publication() -> PublicationView:
        """Version of each regime that is published, what the gate held back and why, and the replicas."""
        return publication_view(board.read())

    @routes.get("/v1/snapshots", summary="Snapshots on disk")
    async def list_snapshots() -> SnapshotList:
        """Complete snapshots, newest first."""
        rows = await asyncio.to_thread(snapshots)  # a slow disk must not delay /livez
        newest_first = tuple(sorted(rows, key=lambda row: (row.step, row.written_at), reverse=True))
        return SnapshotList(snapshots=newest_first)

    return routes


def _job_routes(board: Board, jobs: JobQueue, settings: ServeSettings, deadline_s: float) -> APIRouter:
    routes = APIRouter(tags=["jobs"])

    async def run(request: Request, job: Job) -> Result:
        require_ready(board)
        return await wait_for_result(request.receive, jobs.submit(job), deadline_s)

    @routes.post("/v1/eval", response_model=EvalResult, summary="Evaluate the model", responses=JOB_ERRORS)
    async def evaluate(request: Request, body: EvalRequest) -> Result:
        """Loss, perplexity and token accuracy on the examples; with `generate` also exact match and ROUGE-L."""
        require_at_most(settings.max_examples, len(body.examples), field="examples", setting="max_examples")
        limit = settings.max_new_tokens
        tokens = require_at_most(limit, body.max_new_tokens or limit, field="max_new_tokens", setting="max_new_tokens")
        return await run(request, EvalJob(tuple(body.examples), body.generate, tokens))

    @routes.post("/v1/route", response_model=RouteResult, summary="Route prompts", responses=JOB_ERRORS)
    async def route(request: Request, body: RouteRequest) -> Result:
        """The regime of each prompt, whether it explains the prompt, and what would answer; without the model."""
        require_at_most(settings.max_examples, len(body.prompts), field="prompts", setting="max_examples")
        return await run(request, RouteJob(tuple(_prompt_of(prompt) for prompt in body.prompts)))

    @routes.post(
        "/v1/snapshots",
        status_code=201,
        response_model=SnapshotResult,
        summary="Write a snapshot",
        responses=JOB_ERRORS,
    )
    async def make_snapshot(request: Request) -> Result:
        """Write a snapshot before the next step; responds once it is durable. Takes no body."""
        return await run(request, SnapshotJob())

    return routes


def _list_endpoints(app: FastAPI) -> str:
    """Every endpoint with its summary, one a line."""
    listed = [
        f"{method.upper():5}{path:34}{operation['summary']}"
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    ]
    return "\n".join([f"streamlearn {__version__}", "", *listed, f"GET  {'/openapi.json':34}OpenAPI document", ""])


def _prompt_of(body: PromptRequest) -> PromptInput:
    fields = body.model_dump(mode="json", include={"messages", "image"})
    messages = None if fields["messages"] is None else tuple(fields["messages"])
    return PromptInput(body.prompt, messages, fields["image"])


MAX_ARGUMENT_CHARS = 100

_ARGUMENTS: dict[Scope, dict[str, Any]] = {
    Scope.RUN: {},
    Scope.SNAPSHOT: {"snapshot": Annotated[str, PathArgument(description="Name of a snapshot.", max_length=40)]},
    Scope.REGIME: {"number": Annotated[int, PathArgument(description="Number of a regime.", ge=1, lt=1 << 63)]},
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

    async def run(request: Request, control: Control) -> Result:
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


Run = Callable[[Request, Control], Coroutine[Any, Any, Result]]


def _endpoint(verb: Verb, run: Run) -> Callable[..., Coroutine[Any, Any, Result]]:
    """The handler of a verb; FastAPI reads its arguments from its signature."""

    async def endpoint(request: Request, body: Any = None, **arguments: Any) -> Result:
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
        audit.write(verb, arguments, requester(request), controls.Result.REFUSED, message=why)
    except SnapshotError as error:
        _log.error(Event.HTTP_FAILED, path=request.scope["path"][:MAX_ARGUMENT_CHARS], message=str(error))


def _reason(error: Exception) -> str:
    """One line for the audit log, without the values that a validation found."""
    if isinstance(error, RequestValidationError):
        return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {in_words(fault)}" for fault in error.errors()[:5])
    return f"{type(error).__name__}: {error}"[:400]


def health_app(board: Board) -> FastAPI:
    """An application that serves `/livez` and `/readyz` and nothing else."""
    app = FastAPI(openapi_url=None, redirect_slashes=False, middleware=[Middleware(Defaults)])
    install_error_handlers(app, paths_hint="this port serves only GET /livez and GET /readyz")
    app.include_router(health_routes(board))
    return app


def health_routes(board: Board) -> APIRouter:
    routes = APIRouter(tags=["health"])

    def fails(description: str) -> dict[int | str, dict[str, Any]]:
        return {503: {"model": ErrorBody, "description": description}}

    not_alive = "The daemon or one of its threads failed, or its training loop has not reported in time."

    @routes.get("/livez", summary="Liveness", responses=fails(not_alive))
    async def livez() -> Liveness:
        """200 while the training loop reports in time and no thread has failed, else 503. Restart the daemon on 503."""
        why = board.why_not_alive()
        if why is not None:
            hint = "see the last events in the log; a restart resumes from the last snapshot"
            raise unavailable("not_alive", why, hint=hint, retry_after_s=RETRY_AFTER_S)
        age, bound = round(board.heartbeat_age_s, 3), board.heartbeat_bound_s
        return Liveness(alive=True, heartbeat_age_s=age, heartbeat_bound_s=bound)

    @routes.get("/readyz", summary="Readiness", responses=fails("The daemon is not ready; the message has the reason."))
    async def readyz() -> Readiness:
        """200 once the model is loaded and the loop runs jobs, else 503 with the reason."""
        require_ready(board)
        status = board.read()
        return Readiness(ready=True, phase=status.phase, step=status.step)

    return routes


# The page, at `/` for browsers; programs get the list of endpoints there. Its files are public code and hold no data of
# the run, so they never need the token.


def with_etag(request: Request, body: bytes, media_type: str, headers: dict[str, str] | None = None) -> Response:
    """200 with the body, or 304 where the client has it: the ETag changes with the content."""
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    both = {**(headers or {}), "etag": etag, "cache-control": "no-cache"}
    known = request.headers.get("if-none-match", "").split(",")
    if etag in {value.strip().removeprefix("W/") for value in known}:
        return Response(status_code=304, headers=both)
    return Response(body, headers=both, media_type=media_type)


DISTRIBUTION = "uplot-python"
"""Brings the files of uPlot, the page's chart library (extra `page`). Its Python code is never imported."""
FILES = {"uplot.js": "uplot/static/uPlot.iife.js", "uplot.css": "uplot/static/uPlot.min.css"}
"""Name under which the page asks for a file: its path in the distribution."""


def chart_library() -> dict[str, bytes]:
    """The files by name; empty where the distribution is not installed, and then the page has tables only."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return dict.fromkeys(FILES, b"")
    return {name: Path(str(installed.locate_file(path))).read_bytes() for name, path in FILES.items()}


PREFIX = "/page/"
_INDEX = "index.html"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",  # no inline code, and no eval
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # no string becomes markup
)
_PAGE_HEADERS = {
    "content-security-policy": "; ".join(_POLICY),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}


def is_page_request(request: Request) -> bool:
    if request.method not in SAFE_METHODS:
        return False
    path: str = request.scope["path"]  # what the routes see; `url` is made of the Host header too
    return path.startswith(PREFIX) or (path == "/" and _is_browser(request))


def page_routes(list_endpoints: Callable[[], str]) -> APIRouter:
    """The routes; `list_endpoints` is what programs get at `/`."""
    routes = APIRouter(include_in_schema=False)
    own = {file.name: file.read_bytes() for file in (files(__package__) / "static").iterdir() if file.is_file()}
    assets = {**own, **chart_library()}

    @routes.get("/")
    async def index(request: Request) -> Response:
        if not _is_browser(request):
            return Response(list_endpoints(), media_type="text/plain", headers={"vary": "Accept"})
        return with_etag(request, assets[_INDEX], _MEDIA_TYPES[".html"], {**_PAGE_HEADERS, "vary": "Accept"})

    @routes.get(PREFIX + "{name}")
    async def read_asset(request: Request, name: str) -> Response:
        if name not in assets or name == _INDEX:
            raise ApiError(404, "not_found", f"the page has no file {name[:100]!r}", hint="open / in a browser")
        return with_etag(request, assets[name], _MEDIA_TYPES[PurePath(name).suffix], _PAGE_HEADERS)

    return routes


def _is_browser(request: Request) -> bool:
    """Whether the client requests HTML by name; `*/*`, as curl sends it, does not."""
    return "text/html" in request.headers.get("accept", "")
