"""The gateway's application: OpenAI's completion paths, models, routing for other gateways, health and metrics.

1. Read what the client asks for: a named model, or routing by the prompt.
2. Route each prompt by the publication in use, as the daemon would.
3. Send the request under the name of the version to a server that has it; pass the answer on as it comes.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from streamlearn.gateway.publication import LoadedPublication, Prompt, PublicationWatch, Target
from streamlearn.gateway.upstreams import CONTENT_TYPE, UNKNOWN, EventStream, Fleet, GatewayMetrics, Outcome, Upstream
from streamlearn.http.guards import guards
from streamlearn.http.responses import (
    ApiError,
    EventStreamResponse,
    answer_headers,
    from_http,
    internal_error,
    unavailable,
    while_connected,
)
from streamlearn.http.tracing import annotate
from streamlearn.settings import GatewaySettings

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_PROMPTS = 128
"""Prompts of a request that is routed; routing takes about 1 ms each, however short they are."""
MAX_TOKEN = (1 << 31) - 1
MAX_CONNECTIONS = 400  # each may wait minutes; twice that in sockets is below the usual limit of 1024 open files
RETRY_AFTER_S = 2
FORWARDED = ("traceparent", "tracestate", "x-request-id")


def create_app(settings: GatewaySettings, *, token: str, upstream_token: str = "") -> Starlette:
    """The application. Its lifespan polls the upstreams and watches the published folder.

    Args:
        settings: Where upstreams and publications are.
        token: Bearer token of the gateway, if it needs one.
        upstream_token: Bearer token of the upstreams, if they need one.
    """
    gateway = _Gateway(settings, upstream_token)
    app = Starlette(
        routes=[
            Route("/livez", gateway.livez),
            Route("/readyz", gateway.readyz),
            Route("/metrics", gateway.read_metrics),
            Route("/v1/models", gateway.list_models),
            Route("/v1/models/{name:path}", gateway.describe_model),
            Route(TEXT, gateway.complete, methods=["POST"]),
            Route(CHAT, gateway.complete, methods=["POST"]),
            Route("/v1/route", gateway.route, methods=["POST"]),
        ],
        middleware=guards(settings, token, has_writes=False),
        exception_handlers={ApiError: _on_error, HTTPException: _on_error, Exception: _on_error},
        lifespan=gateway.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.max_body_bytes = settings.max_body_bytes
    return app


class _Gateway:
    def __init__(self, settings: GatewaySettings, upstream_token: str) -> None:
        self._metrics = GatewayMetrics()
        self._fleet = Fleet(
            settings.upstreams,
            partial(Upstream, timeout_s=settings.timeout_s, token=upstream_token),
            self._metrics,
            dns=settings.dns,
            on_demand=settings.on_demand,
        )
        self._watch = PublicationWatch(settings.published, self._fleet, self._metrics, canary=settings.canary)
        self._metrics.watch(self._fleet)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        running = [asyncio.create_task(self._fleet.run()), asyncio.create_task(self._watch.run())]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
            # Until the last has ended: the fleet still closes its connections. gather alone ends with the first.
            for error in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(error, Exception):
                    raise error

    async def livez(self, _: Request) -> Response:
        return JSONResponse({"alive": True})

    async def readyz(self, _: Request) -> Response:
        """200 once a publication is loaded and an upstream serves its backbone."""
        if self._watch.current is None:
            raise _not_ready(f"no publication is loaded: {self._watch.refusal}")
        publication = self._watch.current.publication
        if publication.backbone not in self._fleet.models:
            raise _not_ready(f"at least one upstream must serve {publication.backbone}, found none")
        return JSONResponse({"ready": True, "publication": publication.sequence})

    async def read_metrics(self, _: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._loaded().rows(self._fleet.models)})

    async def describe_model(self, request: Request) -> Response:
        loaded, name = self._loaded(), request.path_params["name"]
        if not loaded.is_routed(name):
            loaded.named(name, self._fleet.models)
        return JSONResponse(next(row for row in loaded.rows(self._fleet.models) if row["id"] == name))

    async def complete(self, request: Request) -> Response:
        """Answer a request to one of the completion paths.

        Raises:
            ApiError: it cannot be answered.
        """
        label, began = UNKNOWN, time.perf_counter()
        try:
            path, fields = request.scope["path"], _fields(await request.body())
            loaded = self._loaded(fields)
            target = await self._target(request.receive, loaded, path, fields)
            label = target.unversioned
            headers = answer_headers(target.model, target.regime, target.score)
            headers["x-streamlearn-publication"] = str(loaded.publication.sequence)
            annotate(model=target.model, regime=target.regime, publication=loaded.publication.sequence)
            work = self._fleet.send(
                target.model, path, lambda name: _body({**fields, "model": name}), _forwarded(request)
            )
            answer = await while_connected(request.receive, work)
        except ApiError as error:
            self._count(label, "cancelled" if error.status == 499 else _outcome(error.status))
            raise
        headers = {**answer.headers, **headers}
        used = "newest" if loaded is self._watch.current else "previous"
        duration = self._metrics.request_seconds.labels(used)
        if not isinstance(answer, EventStream):
            self._count(label, _outcome(answer.status))
            if answer.status < 400:
                duration.observe(time.perf_counter() - began)
            return Response(answer.body, answer.status, {**headers, "content-type": answer.content_type})

        self._metrics.first_token_seconds.labels(used).observe(time.perf_counter() - began)

        async def close() -> None:
            await answer.close()
            self._count(label, answer.outcome)
            duration.observe(time.perf_counter() - began)

        return EventStreamResponse(answer.parts(), close, headers)

    async def route(self, request: Request) -> Response:
        """The decision for each prompt, without its answer; the fields are those of the daemon, and two more."""
        prompts = route_prompts(_object(await request.body()).get("prompts"))
        routes = []
        for prompt, fields in prompts:
            loaded = self._loaded(fields)
            [target] = await self._route(request.receive, loaded, [prompt])
            routes.append(
                {
                    "regime": target.likeliest,
                    "score": target.score,
                    "known": target.regime is not None,
                    "answered_by": "backbone" if target.model == loaded.publication.backbone else "regime",
                    "model": target.model,
                    "publication": loaded.publication.sequence,
                }
            )
        return JSONResponse({"routes": routes})

    def _loaded(self, fields: Mapping[str, Any] | None = None) -> LoadedPublication:
        """The publication for a request with these fields; without them, the newest."""
        loaded = self._watch.current if fields is None else self._watch.choose(fields)
        if loaded is None:
            raise _not_ready("no publication is loaded")
        return loaded

    async def _target(
        self, receive: Receive, loaded: LoadedPublication, path: str, fields: Mapping[str, Any]
    ) -> Target:
        if not loaded.is_routed(fields["model"]):
            return loaded.named(fields["model"], self._fleet.models)
        if path == CHAT:
            prompts = [messages_prompt(fields.get("messages"))]
        else:
            prompts = completion_prompts(fields.get("prompt"))
        targets = await self._route(receive, loaded, prompts)
        models = sorted({target.model for target in targets})
        if len(models) > 1:
            found = ", ".join(models)[:500]
            message = f"all prompts of a request must belong to one model, found {found}"
            raise ApiError(400, "several_models", message, hint="send one request per prompt", param="prompt")
        return min(targets, key=lambda target: target.score or 0.0)

    async def _route(self, receive: Receive, loaded: LoadedPublication, prompts: Sequence[Prompt]) -> list[Target]:
        with self._metrics.routing_seconds.time():
            return await _route(receive, loaded, prompts)

    def _count(self, model: str, outcome: Outcome) -> None:
        self._metrics.requests.labels(model, outcome).inc()


def _not_ready(message: str) -> ApiError:
    return unavailable("not_ready", message, hint="see the gateway's log", retry_after_s=RETRY_AFTER_S)


def _outcome(status: int) -> Outcome:
    if status < 400:
        return "answered"
    return "refused" if status < 500 else "unavailable"


async def _route(receive: Receive, loaded: LoadedPublication, prompts: Sequence[Prompt]) -> list[Target]:
    """Route the prompts in a thread; end after the current one when the client disconnects.

    Raises:
        ApiError: 400, a prompt cannot be encoded; 499, the client disconnected.
    """
    ended = threading.Event()

    def route() -> list[Target]:
        return [loaded.route(prompt) for prompt in takewhile(lambda _: not ended.is_set(), prompts)]

    try:
        return await while_connected(receive, asyncio.to_thread(route))
    finally:
        ended.set()


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a request, of which `model` is a name."""
    fields = _object(body)
    if not isinstance(fields.get("model"), str):
        raise _invalid("model", "model must be the name of a model; GET /v1/models lists them")
    return fields


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "not_json", f"the body must be JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid", "the body must be a JSON object")
    return fields


def _forwarded(request: Request) -> dict[str, str]:
    """The headers that a model server gets: those that identify a request and its trace."""
    values = {name: ",".join(request.headers.getlist(name)) for name in FORWARDED if name in request.headers}
    return {name: value for name, value in values.items() if value.isascii()}


def _body(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as error:  # orjson reads four times as deep as it writes
        raise ApiError(400, "invalid", "the body must be nested at most 254 deep") from error


def completion_prompts(value: Any) -> list[Prompt]:
    """The prompts of a request to /v1/completions: one string, one list of token ids, or a list of either.

    Raises:
        ApiError: 400, it is neither, or holds more than `MAX_PROMPTS`.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return [tuple(value)]
        if len(value) > MAX_PROMPTS:
            raise _invalid(
                "prompt",
                f"prompt must hold at most {MAX_PROMPTS} prompts to be routed, found {len(value)}",
                hint="send several requests, or name the model of a regime, or the backbone, to send it unrouted",
            )
        if all(isinstance(prompt, str) for prompt in value):
            return list(value)
        if all(isinstance(prompt, list) and prompt and _is_tokens(prompt) for prompt in value):
            return [tuple(prompt) for prompt in value]
    raise _invalid("prompt", "prompt must be a string, a list of token ids, or a list of either, and not be empty")


def _is_tokens(value: Sequence[Any]) -> bool:
    return all(type(token) is int and 0 <= token <= MAX_TOKEN for token in value)


def route_prompts(value: Any) -> list[tuple[Prompt, Mapping[str, Any]]]:
    """The prompts of a request to /v1/route, each with the fields that name it.

    Raises:
        ApiError: 400, they are none, too many, or not each a prompt or messages.
    """
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PROMPTS:
        raise _invalid("prompts", f"prompts must be a list of 1 to {MAX_PROMPTS} prompts")
    prompts: list[tuple[Prompt, Mapping[str, Any]]] = []
    for index, row in enumerate(value):
        if not isinstance(row, dict) or len(row.keys() & {"prompt", "messages"}) != 1 or len(row) > 1:
            raise _invalid(f"prompts[{index}]", f"prompts[{index}] must have exactly one of prompt and messages")
        if "messages" in row:
            prompts.append((messages_prompt(row["messages"]), row))
        elif isinstance(row["prompt"], str):
            prompts.append((row["prompt"], row))
        else:
            raise _invalid(f"prompts[{index}].prompt", f"prompts[{index}].prompt must be a string")
    return prompts


def messages_prompt(value: Any) -> Prompt:
    """The conversation of a request to /v1/chat/completions; fields other than role and content decide nothing.

    Raises:
        ApiError: 400, it is no conversation, or not one of text.
    """
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "messages must be a list of at least one message")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _invalid(where, f"{where} must be an object with a role and a content")
    return {"role": value["role"], "content": _text(value.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    """The text of a content. Parts are joined by line breaks, as vLLM joins them."""
    if content is None:  # an assistant's turn that only calls tools
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(where, f"{where} must be a string or a list of parts")
    for index, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise _invalid(
                f"{where}[{index}]",
                f"{where}[{index}] must be a part of type text: only text can be routed",
                hint="name the model of a regime, or the backbone, to send it unrouted",
            )
    return "\n".join(part["text"] for part in content)


def _invalid(param: str, message: str, *, hint: str = "") -> ApiError:
    return ApiError(400, "invalid", message, hint=hint, param=param)


async def _on_error(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    if isinstance(error, ApiError):
        return error.response(path)
    if isinstance(error, HTTPException):
        return from_http(request, error, body_limit=f"{request.app.state.max_body_bytes:,} bytes").response(path)
    return internal_error().response(path)  # uvicorn logs the traceback
