"""The two forms of an answer: a continued text, and a turn of a conversation; whole, or as events of a stream."""

import asyncio
import difflib
import secrets
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Protocol

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from streamlearn import openai_api as shared
from streamlearn.errors import RecordError, StreamlearnError
from streamlearn.http.guards import ApiError, OrjsonResponse
from streamlearn.jobs.generate import MAX_CHARS, MAX_STRINGS
from streamlearn.jobs.queue import GenerateJob, GenerationStart, GenerationStream, JobQueue, PromptInput, Sampling
from streamlearn.jobs.results import FinishReason, GenerateResult
from streamlearn.openai_api import (
    DONE,
    MEDIA_TYPE,
    ModelList,
    NamedModels,
    OpenAIErrorBody,
    OpenAISchema,
    UnreadableMessageError,
    answer_headers,
    conversation_of,
    event,
)
from streamlearn.regimes.route import Requested
from streamlearn.serve.errors import (
    OrjsonRoute,
    client_left,
    disconnect,
    require_at_most,
    too_slow,
    unwrap,
    wait_for_result,
)
from streamlearn.serve.health import require_ready
from streamlearn.serve.models import PositiveCount, require_number
from streamlearn.settings import ServeSettings
from streamlearn.status import Board, Clock, Route, Status
from streamlearn.stream.decode import Role


class Usage(OpenAISchema):
    """Tokens of a request."""

    prompt_tokens: int
    """Of the prompt, with control tokens of the chat template."""
    completion_tokens: int
    """Generated."""
    total_tokens: int
    """Both together."""


class AnswerHead(OpenAISchema):
    """What every answer and every event of a stream begins with."""

    id: str
    """A name of this answer."""
    created: int
    """Unix time, in seconds."""
    model: str
    """What answered: the name of a regime's model or of the backbone."""
    system_fingerprint: str
    """The weights: the optimizer updates made before the request was answered."""
    route: Route
    """The prompt's regime, and what answered."""


class CompletionChoice(OpenAISchema):
    """A text, or a piece of one."""

    index: int = 0
    """There is one choice."""
    text: str
    """The continuation, without the prompt."""
    logprobs: None = None
    """Not supported."""
    finish_reason: FinishReason | None
    """stop: the text ended by itself or with a stop string; length: at its maximum; null: it goes on."""


class Completion(AnswerHead):
    """A continued text, or an event of one."""

    object: Literal["text_completion"] = "text_completion"
    """Type of the object."""
    choices: tuple[CompletionChoice, ...]
    """One; none in the event that holds the usage."""
    usage: Usage | None
    """Null in the events of a stream, but the last with `stream_options.include_usage`."""


class ChatAnswer(OpenAISchema):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    """Who answers."""
    content: str
    """The answer."""
    refusal: None = None
    """Not supported."""


class ChatChoice(OpenAISchema):
    """An answer to a conversation."""

    index: int = 0
    """There is one choice."""
    message: ChatAnswer
    """The answer."""
    logprobs: None = None
    """Not supported."""
    finish_reason: FinishReason
    """stop: the text ended by itself or with a stop string; length: at its maximum."""


class ChatCompletion(AnswerHead):
    """An answer to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    """Type of the object."""
    choices: tuple[ChatChoice, ...]
    """One."""
    usage: Usage
    """Tokens of the request."""


class AnswerForm(Protocol):
    """How an answer is written."""

    prefix: str
    """Of the answer's id."""

    def whole(self, head: AnswerHead, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""

    def opening(self, head: AnswerHead) -> list[dict[str, Any]]:
        """Events before the text."""

    def piece(self, head: AnswerHead, text: str) -> dict[str, Any]:
        """The event of a piece of the text."""

    def closing(self, head: AnswerHead, reason: FinishReason) -> dict[str, Any]:
        """The event after the text."""

    def usage(self, head: AnswerHead, usage: Usage) -> dict[str, Any]:
        """The last event, if it was asked for."""


class CompletionForm:
    """Of /v1/completions."""

    prefix = "cmpl"

    def whole(self, head: AnswerHead, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """See `AnswerForm`."""
        choice = CompletionChoice(text=text, finish_reason=reason)
        return Completion(**vars(head), choices=(choice,), usage=usage).model_dump()

    def opening(self, _: AnswerHead) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def piece(self, head: AnswerHead, text: str) -> dict[str, Any]:
        """See `AnswerForm`."""
        return self._event(head, CompletionChoice(text=text, finish_reason=None))

    def closing(self, head: AnswerHead, reason: FinishReason) -> dict[str, Any]:
        """See `AnswerForm`."""
        return self._event(head, CompletionChoice(text="", finish_reason=reason))

    def usage(self, head: AnswerHead, usage: Usage) -> dict[str, Any]:
        """See `AnswerForm`."""
        return Completion(**vars(head), choices=(), usage=usage).model_dump()

    def _event(self, head: AnswerHead, choice: CompletionChoice) -> dict[str, Any]:
        return Completion(**vars(head), choices=(choice,), usage=None).model_dump()


class ChatForm:
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self, head: AnswerHead, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """See `AnswerForm`."""
        choice = ChatChoice(message=ChatAnswer(content=text), finish_reason=reason)
        return ChatCompletion(**vars(head), choices=(choice,), usage=usage).model_dump()

    def opening(self, head: AnswerHead) -> list[dict[str, Any]]:
        """The role."""
        return [self._event(head, {"role": "assistant", "content": ""}, None)]

    def piece(self, head: AnswerHead, text: str) -> dict[str, Any]:
        """See `AnswerForm`."""
        return self._event(head, {"content": text}, None)

    def closing(self, head: AnswerHead, reason: FinishReason) -> dict[str, Any]:
        """See `AnswerForm`."""
        return self._event(head, {}, reason)

    def usage(self, head: AnswerHead, usage: Usage) -> dict[str, Any]:
        """See `AnswerForm`."""
        return {**self._frame(head), "choices": [], "usage": usage.model_dump()}

    def _event(self, head: AnswerHead, delta: dict[str, str], reason: FinishReason | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._frame(head), "choices": [choice], "usage": None}

    def _frame(self, head: AnswerHead) -> dict[str, Any]:
        return {**head.model_dump(), "object": "chat.completion.chunk"}


_NON_EMPTY = {"type": "string", "minLength": 1}
_STOP = {**_NON_EMPTY, "maxLength": MAX_CHARS}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_IMAGE_URL = {
    "type": "object",
    "properties": {"url": {"type": "string", "pattern": "^data:[a-z/+.-]*;base64,"}, "detail": {}},
    "required": ["url"],
    "additionalProperties": False,
}
_IMAGE_PART = {
    "type": "object",
    "properties": {"type": {"const": "image_url"}, "image_url": _IMAGE_URL},
    "required": ["type", "image_url"],
    "additionalProperties": False,
}


def _one_text(value: object) -> object:
    """A text, also one in a list."""
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    if not isinstance(value, str):
        raise ValueError("expected one text: token ids and several prompts in a request are not supported")
    return value


def _texts(value: object) -> object:
    return () if value is None else (value,) if isinstance(value, str) else value


def _text_or_parts(value: object) -> object:
    if not isinstance(value, str | list) or (isinstance(value, list) and not all(isinstance(e, dict) for e in value)):
        raise ValueError("expected a text or a list of parts")
    return value


class _Decoding(shared.ModelRequest):
    """How the text is decoded."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    temperature: Annotated[float, Field(ge=0, le=2), BeforeValidator(require_number)] | None = 1.0
    """Divides the logits; 0 is greedy decoding."""
    top_p: Annotated[float, Field(ge=0, le=1), BeforeValidator(require_number)] | None = 1.0
    """Tokens are sampled from the fewest, most likely first, whose probabilities sum to it."""
    seed: Annotated[int, Field(ge=-(1 << 53), le=1 << 53), BeforeValidator(require_number)] | None = None
    """An integer that every JSON reader keeps exactly; random when absent. The same seed, request and
    `system_fingerprint` give the same text."""
    stop: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHARS)], ...],
        Field(max_length=MAX_STRINGS),
        BeforeValidator(_texts),
        WithJsonSchema(
            {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STRINGS}, {"type": "null"}]}
        ),
    ] = ()
    """One or up to four strings; the text ends before the first that is found."""
    n: Annotated[int, Field(ge=1, le=1), BeforeValidator(require_number)] | None = 1
    """Number of answers: one."""
    max_tokens: PositiveCount | None = None
    """Maximum number of tokens to generate; at most serve.max_new_tokens."""

    default_tokens: ClassVar[int | None] = None
    """Maximum number of tokens when the request has none; None: serve.max_new_tokens."""

    @property
    def token_limits(self) -> dict[str, int]:
        """The given maximum number of tokens by its field; the last counts."""
        return {} if self.max_tokens is None else {"max_tokens": self.max_tokens}

    def sampling(self, seed: int) -> Sampling | None:
        """How tokens are chosen, with `seed` where the request has none; None: greedily."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature == 0:
            return None
        top_p = 1.0 if self.top_p is None else self.top_p
        return Sampling(temperature, top_p, seed if self.seed is None else self.seed % 2**63)


class TextCompletionRequest(_Decoding, shared.PromptedRequest):
    """A text to continue."""

    model_config = ConfigDict(
        json_schema_extra={
            "additionalProperties": False,
            "examples": [{"model": "streamlearn", "prompt": "The capital of France is", "max_tokens": 8}],
        }
    )

    prompt: Annotated[
        str,
        StringConstraints(min_length=1),
        BeforeValidator(_one_text),
        WithJsonSchema({"anyOf": [_NON_EMPTY, {"type": "array", "items": _NON_EMPTY, "minItems": 1, "maxItems": 1}]}),
    ]
    """Text to continue, or a list with one."""
    default_tokens: ClassVar[int | None] = 16  # as OpenAI


class ChatTurn(shared.ChatMessage):
    """One turn of a conversation."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    role: Role
    """Who wrote it."""
    content: Annotated[
        str | tuple[dict[str, Any], ...],
        BeforeValidator(_text_or_parts),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}]}
        ),
    ]
    """Text, or parts of type text and image_url, the latter with data: URLs and for backbones that read images."""


class ChatCompletionRequest(_Decoding, shared.ChatRequest):
    """A conversation to answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "additionalProperties": False,
            "examples": [
                {"model": "streamlearn", "messages": [{"role": "user", "content": "Capital of France?"}]},
            ],
        }
    )

    messages: Annotated[tuple[ChatTurn, ...], Field(min_length=1)]
    """The conversation so far."""
    max_completion_tokens: PositiveCount | None = None
    """The newer name of `max_tokens`; if both are given, this one counts."""

    @property
    def token_limits(self) -> dict[str, int]:
        """See `_Decoding`."""
        newer = {} if self.max_completion_tokens is None else {"max_completion_tokens": self.max_completion_tokens}
        return super().token_limits | newer


# Fields of OpenAI's API that the daemon has no use for.
#
# Many clients send every field. A field is accepted if it has no effect on the answer, or with the value that asks for
# nothing; with any other value it is refused, because an answer without it would not be what was asked for.


_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "frequency_penalty": (0, 0.0),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logit_bias": ({},),
        "logprobs": (False,),
        "modalities": (["text"],),
        "prediction": (),
        "presence_penalty": (0, 0.0),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": (),
        "web_search_options": (),
    }
)
"""Further fields of the API, and what asks for nothing beside null."""


def refuse_unsupported(fields: Mapping[str, Any], supported: Iterable[str]) -> None:
    """Check the fields of a request that its model does not know.

    Raises:
        ApiError: 400 with the name of a field that would change the answer, or that the API does not have.
    """
    for name, value in fields.items():
        if name in _WITHOUT_EFFECT or (name in _NEUTRAL and _asks_for_nothing(name, value)):
            continue
        if name in _NEUTRAL:
            message, hint = f"{name}: not supported by this server", "leave it out"
        else:
            near = difflib.get_close_matches(name, list(supported), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            message = f"{name[:80]}: unknown field"
        raise ApiError(400, "unsupported_parameter", message, hint=hint, param=name[:80])


def _asks_for_nothing(name: str, value: object) -> bool:
    # The type too: False equals 0, and `logprobs: 0` asks for something.
    return value is None or any(value == each and type(value) is type(each) for each in _NEUTRAL[name])


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
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
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
            async with asyncio.timeout_at(ends):  # not around a yield: each part may run in a task of its own
                await changed.wait()
    except TimeoutError:
        raise too_slow(deadline_s) from None
    finally:
        future.cancel()  # no effect on a finished one
        disconnected.cancel()


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

    def models(self) -> list[str]:
        """Names of the models that a request may ask for."""
        status = self._board.read()
        return self._names(status).listed(_regimes(status))

    async def answer(
        self,
        request: Request,
        body: TextCompletionRequest | ChatCompletionRequest,
        given: PromptInput,
        form: AnswerForm,
    ) -> Response:
        """Answer in one piece or as a stream.

        Raises:
            ApiError: the request cannot be answered.
            StreamlearnError: the job failed with this error.
        """
        job = self._job(body, given)
        field = "prompt" if given.prompt is not None else "messages"
        try:
            if body.stream:
                return await self._stream(request, job, form, wants_usage=body.wants_usage)
            return await self._whole(request, job, form)
        except RecordError as error:
            raise ApiError(400, error.reason, str(error), param=field) from error

    def _job(self, body: TextCompletionRequest | ChatCompletionRequest, given: PromptInput) -> GenerateJob:
        require_ready(self._board)
        requested = self._requested(body.model)
        refuse_unsupported(body.model_extra or {}, type(body).model_fields)
        return GenerateJob(
            given.prompt,
            given.messages,
            given.image,
            max_new_tokens=self._max_new_tokens(body),
            requested=requested,
            sampling=body.sampling(secrets.randbits(63)),
            stop=body.stop,
        )

    def _max_new_tokens(self, body: TextCompletionRequest | ChatCompletionRequest) -> int:
        limit = self._settings.max_new_tokens
        found = min(limit, body.default_tokens or limit)
        for field, wanted in body.token_limits.items():
            found = require_at_most(limit, wanted, field=field, setting="max_new_tokens")
        return found

    def _requested(self, model: str) -> Requested:
        status = self._board.read()
        requested = self._names(status).requested(model)
        if requested is None or (isinstance(requested, int) and requested not in _regimes(status)):
            message, hint = f"the model {model[:100]!r} does not exist", "GET /v1/models lists the models"
            raise ApiError(404, "model_not_found", message, hint=hint, param="model")
        return requested

    def _names(self, status: Status) -> NamedModels:
        return NamedModels(self._name, status.backbone)

    async def _whole(self, request: Request, job: GenerateJob, form: AnswerForm) -> Response:
        result = await wait_for_result(request.receive, self._jobs.submit(job), self._deadline_s)
        assert isinstance(result, GenerateResult), "generations end with their text"
        head = self._head(form, result.step, result.route)
        content = form.whole(head, result.text, result.finish_reason, _usage(result))
        return OrjsonResponse(content, headers=_headers(head))

    async def _stream(self, request: Request, job: GenerateJob, form: AnswerForm, *, wants_usage: bool) -> Response:
        parts = follow(self._jobs, job, request.receive, self._deadline_s)
        start = await anext(parts)  # or an error, which is no stream yet
        assert isinstance(start, GenerationStart), "a generation begins with its start"
        head = self._head(form, start.step, start.route)
        return _EventStream(_events(parts, head, form, wants_usage=wants_usage), headers=_headers(head))

    def _head(self, form: AnswerForm, step: int, route: Route) -> AnswerHead:
        return AnswerHead(
            id=f"{form.prefix}-{uuid.uuid4().hex}",
            created=int(self._clock.wall()),
            model=self._names(self._board.read()).of_answer(route.answered_by, route.regime),
            system_fingerprint=f"step-{step}",
            route=route,
        )


class _EventStream(StreamingResponse):
    """Server-sent events; the job is cancelled with the response."""

    media_type = MEDIA_TYPE

    def __init__(self, events: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        super().__init__(events, headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _events(
    parts: AsyncGenerator[GenerationStart | str | GenerateResult],
    head: AnswerHead,
    form: AnswerForm,
    *,
    wants_usage: bool,
) -> AsyncGenerator[bytes]:
    """A stream ends with DONE; one without it is incomplete, and its last event is an error."""
    async with aclosing(parts):
        for opening in form.opening(head):
            yield event(opening)
        try:
            async for part in parts:
                if isinstance(part, str):
                    yield event(form.piece(head, part))
                elif isinstance(part, GenerateResult):
                    yield event(form.closing(head, part.finish_reason))
                    if wants_usage:
                        yield event(form.usage(head, _usage(part)))
                    yield DONE
        except ApiError as error:
            yield event({"error": error.openai_form})
        except StreamlearnError as error:
            yield event({"error": ApiError(500, "job_failed", str(error), hint="see the log").openai_form})


def _regimes(status: Status) -> list[int]:
    """Numbers of the regimes that can be asked to answer."""
    return [each.number for each in status.adaptation.regimes] if status.adaptation.routes_by_regime else []


def _usage(result: GenerateResult) -> Usage:
    return Usage(
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.tokens,
        total_tokens=result.prompt_tokens + result.tokens,
    )


def _headers(head: AnswerHead) -> dict[str, str]:
    return answer_headers(head.model, head.route.regime, head.route.score)


_DESCRIPTIONS = {
    400: "Invalid JSON, a field that is missing, out of range or not supported, or a Host that is not allowed.",
    401: "The bearer token is missing or wrong.",
    403: "The Origin header names a foreign site.",
    404: "No model has this name.",
    413: "The body is larger than serve.max_body_bytes.",
    415: "The content type is not application/json.",
    500: "The job failed inside the daemon.",
    503: "The queue is full or the daemon is not ready; see Retry-After.",
    504: "The job did not finish in time and was cancelled.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIErrorBody, "description": description} for status, description in _DESCRIPTIONS.items()
}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "JSON with a piece of the text, or [DONE]."}},
    "required": ["data"],
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"itemSchema": _EVENT}}, "description": "The answer, or its events."},
    **_ERRORS,
}


def openai_routes(
    board: Board, jobs: JobQueue, settings: ServeSettings, clock: Clock, name: str, deadline_s: float
) -> APIRouter:
    """The routes of one daemon, whose models have names that begin with `name`."""
    routes = APIRouter(tags=["openai"], route_class=OrjsonRoute)
    answering = Answering(board, jobs, settings, clock, name, deadline_s)

    @routes.get("/v1/models", response_model=ModelList, summary="Models")
    async def list_models() -> Response:
        """What a request may name: what routing finds, the untouched backbone, and each regime."""
        return OrjsonResponse(ModelList.of(answering.models(), int(board.read().started_at)))

    @routes.post("/v1/completions", response_model=Completion, summary="Continue a text", responses=_ANSWERS)
    async def complete(request: Request, body: TextCompletionRequest) -> Response:
        """As OpenAI's path of this name. With `stream` the answer is server-sent events."""
        return await answering.answer(request, body, PromptInput(body.prompt, None), CompletionForm())

    @routes.post(
        "/v1/chat/completions", response_model=ChatCompletion, summary="Answer a conversation", responses=_ANSWERS
    )
    async def chat(request: Request, body: ChatCompletionRequest) -> Response:
        """As OpenAI's path of this name. With `stream` the answer is server-sent events."""
        try:
            conversation = conversation_of(body.messages)
        except UnreadableMessageError as error:
            raise ApiError(400, "unsupported_content", str(error), param=error.field) from error
        given = PromptInput(None, conversation.turns, list(conversation.images) or None)
        return await answering.answer(request, body, given, ChatForm())

    return routes
