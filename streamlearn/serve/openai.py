"""OpenAI's paths: continue a text or answer a conversation with the current model, whole or as server-sent events."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.sse import format_sse_event
from starlette.types import Receive

from streamlearn.board import Board, Clock
from streamlearn.errors import RecordError, StreamlearnError
from streamlearn.http.responses import (
    EVENT_STREAM,
    ApiError,
    EventStreamResponse,
    answer_headers,
    client_left,
    disconnect,
)
from streamlearn.http.tracing import annotate
from streamlearn.jobs.queue import (
    FinishReason,
    GenerateJob,
    GenerateResult,
    GenerationStart,
    GenerationStream,
    JobQueue,
    PromptInput,
)
from streamlearn.serve.errors import require_at_most, require_ready, too_slow, unwrap, wait_for_result
from streamlearn.serve.models import JOB_ERRORS
from streamlearn.serve.openai_schemas import (
    DEFAULT_TEXT_TOKENS,
    Answer,
    ChatCompletionRequest,
    ModelCard,
    ModelList,
    OpenAIErrorBody,
    TextCompletionRequest,
    Usage,
    conversation_of,
    refuse_unsupported,
)
from streamlearn.settings import ServeSettings
from streamlearn.status import Requested, Route, Status


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of models: `name` for what routing finds, `name`-regime-N for a regime, and the backbone's own.

    >>> ModelNames("streamlearn", "HuggingFaceTB/SmolLM2-135M-Instruct").requested("streamlearn-regime-3")
    3
    """

    name: str
    backbone: str

    def answered_by(self, route: Route) -> str:
        """Name of what answered: a regime's model, the backbone, or what no request can name, such as a mean."""
        if route.answered_by == "backbone":
            return self.backbone
        if route.answered_by == "regime" and route.regime is not None:
            return f"{self.name}-regime-{route.regime}"
        return f"{self.name}-{route.answered_by}"

    def requested(self, model: str) -> Requested | None:
        """What the name of a model requests; None for any other name."""
        if model == self.name:
            return "routed"
        if model == self.backbone:
            return "backbone"
        match = re.fullmatch(rf"{re.escape(self.name)}-regime-([1-9][0-9]{{0,17}})", model)
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes one answer in OpenAI's form, whole or as events."""

    chat: bool
    model: str
    start: GenerationStart
    id: str
    created: int

    def whole(self, result: GenerateResult) -> Answer:
        content = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
        choice = _choice(content if self.chat else {"text": result.text}, result.finish_reason)
        return self._answer("chat.completion", (choice,), _usage(result))

    def opening(self) -> Iterable[Answer]:
        return (self._event({"role": "assistant", "content": ""}),) if self.chat else ()

    def piece(self, text: str) -> Answer:
        return self._event({"content": text} if self.chat else {"text": text})

    def closing(self, result: GenerateResult, *, wants_usage: bool) -> Iterable[Answer]:
        yield self._event({} if self.chat else {"text": ""}, result.finish_reason)
        if wants_usage:
            yield self._answer("chat.completion.chunk", (), _usage(result))

    def _event(self, content: dict[str, Any], reason: FinishReason | None = None) -> Answer:
        choice = _choice({"delta": content} if self.chat else content, reason)
        return self._answer("chat.completion.chunk", (choice,), None)

    def _answer(
        self,
        kind: Literal["chat.completion", "chat.completion.chunk"],
        choices: tuple[dict[str, Any], ...],
        usage: Usage | None,
    ) -> Answer:
        return Answer(
            id=self.id,
            object=kind if self.chat else "text_completion",
            created=self.created,
            model=self.model,
            system_fingerprint=f"step-{self.start.step}",
            route=self.start.route,
            choices=choices,
            usage=usage,
        )


def _choice(content: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def _usage(result: GenerateResult) -> Usage:
    total = result.prompt_tokens + result.tokens
    return Usage(prompt_tokens=result.prompt_tokens, completion_tokens=result.tokens, total_tokens=total)


async def follow(
    jobs: JobQueue, job: GenerateJob, receive: Receive, deadline_s: float
) -> AsyncGenerator[GenerationStart | str | GenerateResult]:
    """Queue the job and follow it. It is cancelled when the client disconnects or the deadline passes.

    Raises:
        ApiError: 499 when the client disconnected, 504 after the deadline, 500 when the job failed unexpectedly.
        StreamlearnError: the queue is full, or the job failed with this error.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the event loop has ended, and with it whoever waited
            loop.call_soon_threadsafe(changed.set)

    stream, started = GenerationStream(notify), False
    future = jobs.submit(replace(job, stream=stream))
    future.add_done_callback(lambda _: notify())
    disconnected = asyncio.ensure_future(disconnect(receive))
    disconnected.add_done_callback(lambda _: changed.set())
    ends = loop.time() + deadline_s
    try:
        while True:
            changed.clear()
            finished = future.done()  # first: what was written before is then in the stream
            if stream.start is not None and not started:
                started = True
                yield stream.start
            if piece := stream.take():
                yield piece
            if finished:
                result = unwrap(future)
                assert isinstance(result, GenerateResult)
                yield result
                return
            if disconnected.done():
                raise client_left()
            async with asyncio.timeout_at(ends):  # not around a yield: each part may run in its own task
                await changed.wait()
    except TimeoutError:
        raise too_slow(deadline_s) from None
    finally:
        future.cancel()  # no effect on a finished one
        disconnected.cancel()


async def _events(
    parts: AsyncGenerator[GenerationStart | str | GenerateResult], writer: _Writer, *, wants_usage: bool
) -> AsyncGenerator[bytes]:
    """A stream ends with [DONE]; one without it is incomplete, and its last event is an error."""
    for opening in writer.opening():
        yield _event(opening)
    try:
        async for part in parts:
            if isinstance(part, str):
                yield _event(writer.piece(part))
            elif isinstance(part, GenerateResult):
                for closing in writer.closing(part, wants_usage=wants_usage):
                    yield _event(closing)
                yield format_sse_event(data_str="[DONE]")
    except StreamlearnError as error:
        yield _error_event(ApiError(500, "job_failed", str(error), hint="see the log"))
    except ApiError as error:
        yield _error_event(error)


def _event(answer: Answer) -> bytes:
    return format_sse_event(data_str=answer.model_dump_json())


def _error_event(error: ApiError) -> bytes:
    return format_sse_event(data_str=orjson.dumps({"error": error.openai_form}).decode())


class Answering:
    """Answers requests with the jobs of one daemon."""

    def __init__(
        self, board: Board, jobs: JobQueue, settings: ServeSettings, clock: Clock, name: str, deadline_s: float
    ) -> None:
        self._board = board
        self._jobs = jobs
        self._settings = settings
        self._clock = clock
        self._name = name
        self._deadline_s = deadline_s

    def models(self) -> ModelList:
        """The models that a request may ask for."""
        status = self._board.read()
        names = [self._name, status.backbone, *(f"{self._name}-regime-{number}" for number in _regimes(status))]
        created = int(status.started_at)
        return ModelList(data=tuple(ModelCard(id=name, created=created) for name in names))

    def model(self, name: str) -> ModelCard:
        """One of `models`.

        Raises:
            ApiError: there is no such model.
        """
        self._requested(name)
        return next(model for model in self.models().data if model.id == name)

    async def answer(
        self,
        request: Request,
        response: Response,
        body: TextCompletionRequest | ChatCompletionRequest,
    ) -> Answer | EventStreamResponse:
        """Answer in one piece, with headers in `response`, or as a stream.

        Raises:
            ApiError: the request cannot be answered.
            StreamlearnError: the job failed with this error.
        """
        job = self._job(body)
        try:
            if body.stream:
                parts = follow(self._jobs, job, request.receive, self._deadline_s)
                start = await anext(parts)  # or an error, which is no stream yet
                assert isinstance(start, GenerationStart), "a generation begins with its start"
                writer = self._writer(body, start)
                wants_usage = bool(body.stream_options and body.stream_options.include_usage)
                events = _events(parts, writer, wants_usage=wants_usage)
                return EventStreamResponse(events, parts.aclose, _headers(writer))
            result = await wait_for_result(request.receive, self._jobs.submit(job), self._deadline_s)
        except RecordError as error:
            field = "prompt" if job.prompt is not None else "messages"
            raise ApiError(400, error.reason, str(error), param=field) from error
        assert isinstance(result, GenerateResult), "a generation ends with its text"
        writer = self._writer(body, result)
        response.headers.update(_headers(writer))
        return writer.whole(result)

    def _job(self, body: TextCompletionRequest | ChatCompletionRequest) -> GenerateJob:
        require_ready(self._board)
        requested = self._requested(body.model)
        refuse_unsupported(body.model_extra or {}, type(body).model_fields)
        tokens = limit = self._settings.max_new_tokens
        if isinstance(body, ChatCompletionRequest):
            given = conversation_of(body.messages)
        else:
            given = PromptInput(body.prompt, None)
            tokens = min(limit, DEFAULT_TEXT_TOKENS)
        for field in ("max_tokens", "max_completion_tokens"):
            if (number := getattr(body, field, None)) is not None:
                tokens = require_at_most(limit, number, field=field, setting="max_new_tokens")
        return GenerateJob(
            given.prompt,
            given.messages,
            given.image,
            max_new_tokens=tokens,
            requested=requested,
            sampling=body.sampling(),
            stop=body.stop,
        )

    def _requested(self, model: str) -> Requested:
        status = self._board.read()
        requested = ModelNames(self._name, status.backbone).requested(model)
        if requested is None or (isinstance(requested, int) and requested not in _regimes(status)):
            message, hint = f"the model {model[:100]!r} does not exist", "GET /v1/models lists the models"
            raise ApiError(404, "model_not_found", message, hint=hint, param="model")
        return requested

    def _writer(self, body: TextCompletionRequest | ChatCompletionRequest, start: GenerationStart) -> _Writer:
        chat = isinstance(body, ChatCompletionRequest)
        model = ModelNames(self._name, self._board.read().backbone).answered_by(start.route)
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        return _Writer(chat, model, start, answer_id, int(self._clock.wall()))


def _regimes(status: Status) -> list[int]:
    """Numbers of the regimes that can be asked to answer."""
    return [regime.number for regime in status.adaptation.regimes] if status.adaptation.routes_by_regime else []


def _headers(writer: _Writer) -> dict[str, str]:
    route = writer.start.route
    annotate(model=writer.model, regime=route.regime, known=route.known, step=writer.start.step)
    return answer_headers(writer.model, route.regime, route.score)


_DATA = {"type": "string", "description": "JSON with a piece of the text, or [DONE]."}
_EVENT = {"type": "object", "properties": {"data": _DATA}, "required": ["data"]}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {EVENT_STREAM: {"itemSchema": _EVENT}}, "description": "The answer, or its events."},
    **{
        status: {"model": OpenAIErrorBody, "description": error["description"]}
        for status, error in JOB_ERRORS.items()
        if status != 422
    },
    404: {"model": OpenAIErrorBody, "description": "No model has this name."},
}


def openai_routes(
    board: Board, jobs: JobQueue, settings: ServeSettings, clock: Clock, name: str, deadline_s: float
) -> APIRouter:
    """The routes of one daemon, whose models have names that begin with `name`."""
    routes = APIRouter(tags=["openai"])
    answering = Answering(board, jobs, settings, clock, name, deadline_s)

    @routes.get("/v1/models", summary="Models")
    async def list_models() -> ModelList:
        """What a request may name: what routing finds, the untouched backbone, and each regime."""
        return answering.models()

    @routes.get("/v1/models/{name:path}", summary="One model", responses={404: _RESPONSES[404]})
    async def describe_model(name: str) -> ModelCard:
        """Whether a request may name it."""
        return answering.model(name)

    @routes.post("/v1/completions", response_model=Answer, summary="Continue a text", responses=_RESPONSES)
    async def complete(
        request: Request, response: Response, body: TextCompletionRequest
    ) -> Answer | EventStreamResponse:
        """Compatible with OpenAI's path of this name. With `stream` the answer is server-sent events."""
        return await answering.answer(request, response, body)

    @routes.post("/v1/chat/completions", response_model=Answer, summary="Answer a conversation", responses=_RESPONSES)
    async def chat(request: Request, response: Response, body: ChatCompletionRequest) -> Answer | EventStreamResponse:
        """Compatible with OpenAI's path of this name. With `stream` the answer is server-sent events."""
        return await answering.answer(request, response, body)

    return routes
