"""The gateway's application: OpenAI's paths, health and metrics."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from streamlearn.events import Event, get_logger
from streamlearn.gateway.publication import CompletionRequest, Prompt, PublicationWatch, RoutedPrompt, Target
from streamlearn.gateway.upstreams import (
    UNKNOWN,
    Answer,
    Fleet,
    GatewayMetrics,
    Outcome,
    Upstream,
    UpstreamFailedError,
    UpstreamTimeoutError,
)
from streamlearn.http.guards import ApiError, unavailable
from streamlearn.openai_api import answer_headers

if TYPE_CHECKING:
    from streamlearn.gateway.publication import LoadedPublication
from contextlib import asynccontextmanager, suppress
from typing import ClassVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from streamlearn.gateway import upstreams as gateway_metrics
from streamlearn.gateway.publication import CHAT, TEXT
from streamlearn.http.guards import OrjsonResponse, guards
from streamlearn.http.server import GuardedConnection
from streamlearn.settings import GatewaySettings

MEDIA_TYPE = "text/event-stream"
END = b"data: [DONE]"
_KEPT = len(END) + 4  # and line breaks after it

_log = get_logger("gateway")


class EventStream:
    """Server-sent events whose first part has arrived. It must be closed."""

    def __init__(
        self, upstream: Upstream, first: bytes, parts: AsyncIterator[bytes], resources: AsyncExitStack
    ) -> None:
        self._upstream = upstream
        self._first = first
        self._parts = parts
        self._resources = resources
        self.outcome: Outcome = "cancelled"
        """What became of it, once it is closed."""

    @classmethod
    async def begin(cls, upstream: Upstream, path: str, body: bytes) -> "EventStream | Answer":
        """Send a request and wait for the first part of its answer; an answer that is no stream is returned whole.

        Raises:
            UpstreamFailedError: the request failed before its answer began.
            UpstreamTimeoutError: nothing came in time.
        """
        async with AsyncExitStack() as resources:
            response = await resources.enter_async_context(upstream.open(path, body))
            content_type = response.headers.get("content-type", "")
            with upstream.translated():
                if not content_type.startswith(MEDIA_TYPE):
                    return Answer(response.status, content_type, await response.read())
                parts = response.content.iter_any()
                first = await anext(parts, b"")
            if not first:
                raise UpstreamFailedError("the answer ended before it began")
            return cls(upstream, first, parts, resources.pop_all())

    async def parts(self) -> AsyncIterator[bytes]:
        """The stream as it arrives. One that breaks off ends with an error event and without `[DONE]`."""
        last = self._first
        self._note_end(last)
        yield last
        try:
            with self._upstream.translated():
                async for part in self._parts:
                    last = (last + part)[-_KEPT:]
                    self._note_end(last)
                    yield part
            if self.outcome != "answered":
                raise UpstreamFailedError(f"the stream ended without {END.decode()}")
        except (UpstreamFailedError, UpstreamTimeoutError) as error:
            _log.warning(Event.STREAM_BROKEN, upstream=self._upstream.url, reason=str(error))
            self.outcome = "broken"
            yield _error_event()

    def _note_end(self, last: bytes) -> None:
        """Note whether the stream is complete with its newest part: clients may leave at `[DONE]`."""
        self.outcome = "answered" if last.rstrip().endswith(END) else "cancelled"

    async def close(self) -> None:
        """Close the connection to the model server, which then stops generating. Safe to call twice."""
        await self._resources.aclose()


class EventStreamResponse(StreamingResponse):
    """Passes an event stream on to the client, and closes it when it ends or the client leaves."""

    def __init__(self, stream: EventStream, headers: Mapping[str, str], finished: Callable[[Outcome], None]) -> None:
        """`finished` is called once, when the stream has been closed."""
        super().__init__(stream.parts(), headers=headers, media_type=MEDIA_TYPE)
        self._stream = stream
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.close()
            self._finished(self._stream.outcome)


def _error_event() -> bytes:
    """An error event, after the end of whatever line the stream broke off in."""
    error = unavailable("stream_broken", "the model server broke the stream off", hint="send it again", retry_after_s=0)
    return b"\n\ndata: " + orjson.dumps({"error": error.openai_form}) + b"\n\n"


INLINE_BYTES = 16 << 10
"""Requests of one prompt up to this size, about 1 ms of routing, are routed on the event loop; others in a thread."""
RETRY_AFTER_S = 2

T = TypeVar("T")


class Completions:
    """The handler of both completion paths."""

    def __init__(self, watch: PublicationWatch, fleet: Fleet, metrics: GatewayMetrics) -> None:
        self._watch = watch
        self._fleet = fleet
        self._metrics = metrics

    async def handle(self, request: Request) -> Response:
        """Answer one request.

        Raises:
            ApiError: it cannot be answered.
        """
        label = UNKNOWN
        try:
            loaded = self.publication()
            asked = CompletionRequest.parse(request.scope["path"], await request.body())
            target = await self._target(request.receive, loaded, asked)
            label = target.unversioned
            return await self._forward(request.receive, asked, target, headers_of(target, loaded))
        except ApiError as error:
            self._count(label, "cancelled" if error.status == 499 else _outcome(error.status))
            raise

    def publication(self) -> "LoadedPublication":
        """The publication in use.

        Raises:
            ApiError: 503, there is none yet.
        """
        if self._watch.current is None:
            hint = "retry once /readyz returns 200"
            raise unavailable("not_ready", "no publication is loaded", hint=hint, retry_after_s=RETRY_AFTER_S)
        return self._watch.current

    async def _target(self, receive: Receive, loaded: "LoadedPublication", asked: CompletionRequest) -> Target:
        if not loaded.names.is_routed(asked.model):
            return loaded.names.named(asked.model, self._fleet.models)
        prompts, began = asked.prompts(), time.perf_counter()
        if len(prompts) == 1 and asked.num_bytes <= INLINE_BYTES:
            routed = [loaded.router.route(prompts[0])]
        else:
            routed = await _route_in_thread(receive, loaded, prompts)
        self._metrics.routing_seconds.observe(time.perf_counter() - began)
        targets = [loaded.names.routed(each) for each in routed]
        _require_one_model(targets)
        return min(targets, key=lambda each: each.score or 0.0)

    async def _forward(
        self, receive: Receive, asked: CompletionRequest, target: Target, headers: dict[str, str]
    ) -> Response:
        body, path = asked.body_for(target.model), asked.path
        if asked.stream:
            begun = await while_connected(
                receive, self._fleet.send(target.model, lambda each: EventStream.begin(each, path, body))
            )
            if isinstance(begun, EventStream):
                return EventStreamResponse(begun, headers, lambda outcome: self._count(target.unversioned, outcome))
            answer = begun
        else:
            answer = await while_connected(
                receive, self._fleet.send(target.model, lambda each: each.complete(path, body))
            )
        self._count(target.unversioned, _outcome(answer.status))
        return _response(answer, headers)

    def _count(self, model: str, outcome: Outcome) -> None:
        self._metrics.requests.labels(model, outcome).inc()


def headers_of(target: Target, loaded: "LoadedPublication") -> dict[str, str]:
    """What the client learns about the choice."""
    headers = answer_headers(target.model, target.regime, target.score)
    return {**headers, "x-streamlearn-publication": str(loaded.publication.sequence)}


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        ApiError: 499, the client disconnected.
    """
    working, left = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        waiting: set[asyncio.Future[Any]] = {working, left}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        left.cancel()
    raise ApiError(499, "client_left", "the client closed the connection")  # no one reads it


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _route_in_thread(
    receive: Receive, loaded: "LoadedPublication", prompts: Sequence[Prompt]
) -> list[RoutedPrompt]:
    """Route the prompts without delaying other requests; after the one under way, end when the client disconnects.

    Raises:
        ApiError: 400, a prompt cannot be encoded; 499, the client disconnected.
    """
    ended = threading.Event()

    def route() -> list[RoutedPrompt]:
        return [loaded.router.route(each) for each in takewhile(lambda _: not ended.is_set(), prompts)]

    try:
        return await while_connected(receive, asyncio.to_thread(route))
    finally:
        ended.set()


def _require_one_model(targets: list[Target]) -> None:
    models = sorted({each.model for each in targets})
    if len(models) > 1:
        raise ApiError(
            400,
            "several_models",
            f"all prompts of a request must belong to one model, found {', '.join(models)[:500]}",
            hint="send one request per prompt",
            param="prompt",
        )


def _response(answer: Answer, headers: dict[str, str]) -> Response:
    return Response(answer.body, answer.status, headers | {"content-type": answer.content_type})


def _outcome(status: int) -> Outcome:
    if status < 400:
        return "answered"
    return "refused" if status < 500 else "unavailable"


def create_app(settings: GatewaySettings, *, token: str, upstream_token: str = "") -> Starlette:
    """The application. Its lifespan polls the upstreams and watches the published folder.

    Args:
        settings: Where upstreams and publications are.
        token: Bearer token of the gateway, if it needs one.
        upstream_token: Bearer token of the upstreams, if they need one.
    """
    return _Gateway(settings, token, upstream_token).app


class _Gateway:
    """The parts of an application, and the paths that are not completions."""

    def __init__(self, settings: GatewaySettings, token: str, upstream_token: str) -> None:
        counted = gateway_metrics.GatewayMetrics()
        upstreams = [Upstream(url, timeout_s=settings.timeout_s, token=upstream_token) for url in settings.upstreams]
        self._metrics = counted
        self._fleet = Fleet(upstreams, counted)
        self._watch = PublicationWatch(settings.published, self._fleet, counted)
        self._completions = Completions(self._watch, self._fleet, counted)
        counted.watch(lambda: iter(self._fleet.upstreams))
        self.app = Starlette(
            routes=[
                Route("/livez", _livez),
                Route("/readyz", self._readyz),
                Route("/metrics", self._read_metrics),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._describe_model),
                Route(TEXT, self._completions.handle, methods=["POST"]),
                Route(CHAT, self._completions.handle, methods=["POST"]),
            ],
            middleware=guards(settings, token, has_writes=False),
            exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error},
            lifespan=self._lifespan,
        )
        self.app.router.redirect_slashes = False

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        running = asyncio.gather(self._fleet.run(), self._watch.run())
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await self._fleet.close()

    async def _readyz(self, _: Request) -> Response:
        """200 once a publication is loaded and an upstream serves its backbone."""
        if self._watch.current is None:
            message = f"no publication is loaded: {self._watch.refusal}"
            raise unavailable("not_ready", message, hint="see the log", retry_after_s=RETRY_AFTER_S)
        publication = self._watch.current.publication
        if not self._fleet.has_all([publication.backbone]):
            message = f"at least one upstream must serve {publication.backbone}, found none"
            raise unavailable("not_ready", message, hint="see the log", retry_after_s=RETRY_AFTER_S)
        return OrjsonResponse({"ready": True, "publication": publication.sequence})

    async def _read_metrics(self, _: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": gateway_metrics.CONTENT_TYPE})

    async def _list_models(self, _: Request) -> Response:
        rows = self._completions.publication().names.rows(self._fleet.models)
        return OrjsonResponse({"object": "list", "data": rows})

    async def _describe_model(self, request: Request) -> Response:
        names, name = self._completions.publication().names, request.path_params["name"]
        if not names.is_routed(name):
            names.named(name, self._fleet.models)
        return OrjsonResponse(next(row for row in names.rows(self._fleet.models) if row["id"] == name))


async def _livez(_: Request) -> Response:
    return OrjsonResponse({"alive": True})


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope["path"])


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    code, message = {
        404: ("not_found", f"nothing is served at {path[:200]}"),
        405: ("method_not_allowed", f"{path[:200]} does not accept {request.method}"),
    }.get(error.status_code, ("bad_request", str(error.detail)))
    return ApiError(error.status_code, code, message, headers=error.headers).response(path)


class GatewayConnection(GuardedConnection):
    """One client connection. Each may wait minutes for its answer, so there may be many."""

    max_connections: ClassVar[int] = 400  # twice that in sockets is below the usual limit of 1024 open files
