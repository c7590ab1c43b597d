"""The endpoints. A handler reads the board, or puts a job on the queue and waits for it; it never touches the model."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from streamlearn import __version__
from streamlearn.jobs.queue import EvalJob, ExpertsJob, GenerateJob, Job, JobQueue, SnapshotJob
from streamlearn.jobs.results import EvalResult, ExpertsResult, GenerateResult, Result, SnapshotResult
from streamlearn.serve import metrics, replies
from streamlearn.serve.guards import guards
from streamlearn.serve.outcome import outcome
from streamlearn.serve.replies import ApiError, OrjsonResponse, unavailable
from streamlearn.serve.schemas import ErrorBody, EvalRequest, GenerateRequest, SnapshotList, SnapshotRow
from streamlearn.serve.views import (
    JobsView,
    Liveness,
    Readiness,
    RegimesView,
    ShiftsView,
    StatusView,
    regimes_view,
    shifts_view,
    status_view,
)
from streamlearn.settings import ServeSettings
from streamlearn.status.board import Board, Clock

JOB_DEADLINE_S = (
    600.0  # 1024 examples at one a second and half of the time given to training come to 2048 s: split those
)
NOT_READY_RETRY_S = 5

_DESCRIPTION = """What a continual learner does, and how good it is right now.

Reading endpoints answer from a status that the training loop publishes, so they answer while it works. `POST`
endpoints queue a job that the loop serves between two steps within its time budget; a full queue is a 503 with
`Retry-After`. Closing the connection takes a job back. Nothing here changes a bit of the training run.

Every answer that is not a success is `{"error": {"code", "message", "hint"}}`."""

_Responses = dict[int | str, dict[str, Any]]

_REFUSED: _Responses = {
    401: {"model": ErrorBody, "description": "It needs the daemon's bearer token."},
    400: {"model": ErrorBody, "description": "Not JSON, an unusable record, or a Host that is not this machine."},
    403: {"model": ErrorBody, "description": "The Origin header names another site."},
    413: {"model": ErrorBody, "description": "The body is larger than serve.max_body_bytes."},
    415: {"model": ErrorBody, "description": "The content type is not application/json."},
    422: {"model": ErrorBody, "description": "A field is missing, unknown or out of bounds; the message names it."},
    500: {"model": ErrorBody, "description": "The job failed inside the daemon."},
    503: {"model": ErrorBody, "description": "The queue is full or the daemon is not ready; see Retry-After."},
    504: {"model": ErrorBody, "description": "The job was not done in time and is cancelled."},
}


def create_app(
    board: Board,
    jobs: JobQueue,
    settings: ServeSettings,
    snapshots: Callable[[], Sequence[SnapshotRow]],
    clock: Clock,
    *,
    token: str,
    job_deadline_s: float = JOB_DEADLINE_S,
) -> FastAPI:
    """The application; `snapshots` lists what is on disk and is called in a thread of its own."""
    app = FastAPI(
        title="streamlearn",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # both viewers load scripts from a foreign host
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        middleware=guards(settings, token),
    )
    replies.install(app, retry_after_s=max(1, math.ceil(settings.queue_size * settings.eval_budget_s)))
    app.include_router(_health_routes(board))
    app.include_router(_reading_routes(board, jobs, snapshots, clock))
    app.include_router(_job_routes(board, jobs, settings, job_deadline_s))
    app.include_router(_index_route(app))
    _tell_bounds(app, settings)
    return app


def _tell_bounds(app: FastAPI, settings: ServeSettings) -> None:
    """In the OpenAPI document: those that the configuration sets."""
    schemas = app.openapi()["components"]["schemas"]
    schemas["EvalRequest"]["properties"]["examples"]["maxItems"] = settings.max_examples
    for name in ("EvalRequest", "GenerateRequest"):
        [number, _] = schemas[name]["properties"]["max_new_tokens"]["anyOf"]
        number["maximum"] = settings.max_new_tokens


def _health_routes(board: Board) -> APIRouter:
    routes = APIRouter(tags=["health"])
    stalled: _Responses = {503: {"model": ErrorBody, "description": "The loop was silent for too long, or failed."}}

    @routes.get("/livez", response_model=Liveness, summary="Does the training loop turn?", responses=stalled)
    async def livez() -> Response:
        """200 while the loop's last report is younger than its bound; a supervisor restarts the daemon otherwise."""
        why = board.why_not_alive()
        if why is not None:
            hint = "the log's last event says where it stands; a restart goes on from the last snapshot"
            raise unavailable("not_alive", why, hint=hint, retry_after_s=NOT_READY_RETRY_S)
        age, bound = round(board.heartbeat_age_s, 3), board.heartbeat_bound_s
        return OrjsonResponse(Liveness(alive=True, heartbeat_age_s=age, heartbeat_bound_s=bound))

    unready: _Responses = {503: {"model": ErrorBody, "description": "Not ready; the message says why."}}

    @routes.get("/readyz", response_model=Readiness, summary="Are jobs taken?", responses=unready)
    async def readyz() -> Response:
        """200 once the model is loaded and the loop serves jobs; else 503 with the reason."""
        _must_be_ready(board)
        status = board.read()
        return OrjsonResponse(Readiness(ready=True, phase=status.phase, step=status.step))

    return routes


def _reading_routes(
    board: Board, jobs: JobQueue, snapshots: Callable[[], Sequence[SnapshotRow]], clock: Clock
) -> APIRouter:
    routes = APIRouter(tags=["reading"])
    registry = metrics.registry(board, jobs, clock)
    text: _Responses = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text format."}
    }

    @routes.get("/metrics", response_class=Response, summary="Prometheus metrics", responses=text)
    async def read_metrics() -> Response:
        """Everything in /v1/status that is a number, and the process's memory, CPU and files."""
        return Response(metrics.exposition(registry), headers={"content-type": metrics.CONTENT_TYPE})

    @routes.get("/v1/status", response_model=StatusView, summary="What the daemon does")
    async def read_status() -> Response:
        """Phase, progress, loss, position and lag per partition, the newest snapshot, and what runs on what."""
        waiting = JobsView(waiting=len(jobs), capacity=jobs.size)
        return OrjsonResponse(status_view(board, waiting, clock))

    @routes.get("/v1/regimes", response_model=RegimesView, summary="Regimes and what was forgotten")
    async def read_regimes() -> Response:
        """Every remembered regime with the history of its hold-out scores, average forgetting, backward transfer."""
        return OrjsonResponse(regimes_view(board.read()))

    @routes.get("/v1/shifts", response_model=ShiftsView, summary="Shifts, the newest last")
    async def read_shifts() -> Response:
        """Where the stream changed, on what evidence, which regime was entered, what its probe cost and found."""
        return OrjsonResponse(shifts_view(board.read()))

    @routes.get("/v1/snapshots", response_model=SnapshotList, summary="Snapshots on disk")
    async def list_snapshots() -> Response:
        """The newest first."""
        rows = await asyncio.to_thread(snapshots)  # a slow disk must not delay /livez
        newest_first = tuple(sorted(rows, key=lambda row: (row.step, row.written_at), reverse=True))
        return OrjsonResponse(SnapshotList(snapshots=newest_first))

    return routes


def _job_routes(board: Board, jobs: JobQueue, settings: ServeSettings, deadline_s: float) -> APIRouter:
    routes = APIRouter(tags=["jobs"], route_class=_OrjsonRoute)

    async def done(request: Request, job: Job) -> Result:
        _must_be_ready(board)
        return await outcome(request.receive, jobs.submit(job), deadline_s)

    def new_tokens(asked: int | None) -> int:
        return _within("max_new_tokens", asked or settings.max_new_tokens, "max_new_tokens", settings.max_new_tokens)

    @routes.post("/v1/eval", response_model=EvalResult, summary="Measure the model", responses=_REFUSED)
    async def evaluate(request: Request, body: EvalRequest) -> Response:
        """Loss, perplexity and token accuracy on the examples; with `generate` also exact match and ROUGE-L.

        The loop works on it between steps, a slice of its time budget at a time.
        """
        _within("examples", len(body.examples), "max_examples", settings.max_examples)
        job = EvalJob(tuple(body.examples), body.generate, new_tokens(body.max_new_tokens))
        return OrjsonResponse(await done(request, job))

    @routes.post("/v1/generate", response_model=GenerateResult, summary="Let the model write", responses=_REFUSED)
    async def generate(request: Request, body: GenerateRequest) -> Response:
        """Continue a prompt or answer a conversation with the model as it is now, greedily."""
        given = body.model_dump(mode="json", include={"messages", "image"})
        messages = None if given["messages"] is None else tuple(given["messages"])
        job = GenerateJob(body.prompt, messages, new_tokens(body.max_new_tokens), given["image"])
        return OrjsonResponse(await done(request, job))

    @routes.get("/v1/experts", response_model=ExpertsResult, summary="What experts are used for", responses=_REFUSED)
    async def experts(request: Request, layer: str | None = None) -> Response:
        """Load, importance, claims, similarity and the mixing of tokens (N_eff), expert by expert.

        The loop scores the hold-out records for it between steps, a slice of its time budget at a time. `layer` is
        any part of a layer's name and limits the answer to those that have it.
        """
        return OrjsonResponse(await done(request, ExpertsJob(layer)))

    @routes.post(
        "/v1/snapshots", status_code=201, response_model=SnapshotResult, summary="Snapshot now", responses=_REFUSED
    )
    async def make_snapshot(request: Request) -> Response:
        """Write a snapshot before the next step; answers once it is durable. Takes no body."""
        return OrjsonResponse(await done(request, SnapshotJob()), 201)

    return routes


def _index_route(app: FastAPI) -> APIRouter:
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def index() -> Response:
        listed = [
            f"{method.upper():5}{path:15}{operation['summary']}"
            for path, methods in app.openapi()["paths"].items()
            for method, operation in methods.items()
        ]
        lines = [f"streamlearn {__version__}", "", *listed, f"GET  {'/openapi.json':15}All of it, for programs", ""]
        return Response("\n".join(lines), media_type="text/plain")

    return routes


def _must_be_ready(board: Board) -> None:
    why = board.why_not_ready()
    if why is not None:
        hint = "try again once /readyz answers 200; /v1/status shows what the daemon does"
        raise unavailable("not_ready", why, hint=hint, retry_after_s=NOT_READY_RETRY_S)


def _within(field: str, found: int, setting: str, bound: int) -> int:
    if found > bound:
        message = f"{field}: at most {bound} are allowed, found {found}"
        raise ApiError(422, "invalid", message, hint=f"ask for less, or raise serve.{setting}")
    return found


class _OrjsonRequest(Request):
    """Reads its body with orjson: strict UTF-8, no NaN, bounded depth."""

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class _OrjsonRoute(APIRoute):
    """A route whose body is read by orjson."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_OrjsonRequest(request.scope, request.receive))

        return handler
