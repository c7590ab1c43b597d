"""Answers to completion requests: routed, forwarded, and passed on under the name of what answered."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from streamlearn.gateway.completion_request import CompletionRequest
from streamlearn.gateway.event_stream import EventStream, EventStreamResponse
from streamlearn.gateway.fleet import Fleet
from streamlearn.gateway.gateway_metrics import UNKNOWN, GatewayMetrics, Outcome
from streamlearn.gateway.model_names import Target
from streamlearn.gateway.prompt import Prompt
from streamlearn.gateway.publication_watch import PublicationWatch
from streamlearn.gateway.routed_prompt import RoutedPrompt
from streamlearn.gateway.upstream import Answer
from streamlearn.http.replies import ApiError, unavailable
from streamlearn.openai_api.answer_headers import answer_headers

INLINE_BYTES = 16 << 10
"""Requests of one prompt up to this size, about 1 ms of routing, are routed on the event loop; others in a thread."""
RETRY_AFTER_S = 2

T = TypeVar("T")

if TYPE_CHECKING:
    from streamlearn.gateway.published_folder import LoadedPublication


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
