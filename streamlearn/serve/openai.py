"""OpenAI's paths: continue a text or answer a conversation with the current model, whole or as server-sent events."""

import asyncio
import difflib
import re
import secrets
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.sse import format_sse_event
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StringConstraints, WithJsonSchema
from starlette.types import Receive

from streamlearn.errors import RecordError, StreamlearnError
from streamlearn.http.responses import EVENT_STREAM, ApiError, EventStreamResponse, answer_headers
from streamlearn.jobs.queue import (
    FinishReason,
    GenerateJob,
    GenerateResult,
    GenerationStart,
    GenerationStream,
    JobQueue,
    PromptInput,
    Sampling,
)
from streamlearn.regimes.route import Requested
from streamlearn.serve.errors import client_left, disconnect, require_at_most, too_slow, unwrap, wait_for_result
from streamlearn.serve.health import require_ready
from streamlearn.serve.models import JOB_ERRORS, PositiveCount, require_number
from streamlearn.settings import ServeSettings
from streamlearn.status import Board, Clock, Route, Status
from streamlearn.stream.decode import Role

DEFAULT_NAME = "streamlearn"
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 256
"""Length of a stop string: the end of a text is compared with every beginning of every string."""


class OpenAISchema(BaseModel):
    """An object of the API: further fields are kept, docstrings describe fields."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)


class Usage(OpenAISchema):
    """Tokens of a request."""

    prompt_tokens: int
    """Of the prompt, with control tokens of the chat template."""
    completion_tokens: int
    """Generated."""
    total_tokens: int
    """Both together."""


class Answer(OpenAISchema):
    """A continued text or an answer to a conversation; or one event of it."""

    id: str
    """Identifies the answer."""
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    """Type of the object."""
    created: int
    """Unix time, in seconds."""
    model: str
    """What answered: the name of a regime's model or of the backbone."""
    system_fingerprint: str
    """The weights: the optimizer updates made before the request was answered."""
    route: Route
    """The prompt's regime, and what answered."""
    choices: tuple[dict[str, Any], ...]
    """One, with `text`, `message` or (in events of a conversation) `delta`, and `finish_reason`: stop, length, or null
    while the text goes on. None in the event that holds the usage."""
    usage: Usage | None
    """Null in the events of a stream, except the last one with `stream_options.include_usage`."""


class OpenAIErrorDetail(OpenAISchema):
    """Description of an error."""

    message: str
    """What was expected, what was found, and what to do."""
    type: Literal["invalid_request_error", "server_error"]
    """invalid_request_error: change the request; server_error: retry later."""
    param: str | None
    """The field that is wrong."""
    code: str | None
    """Stable identifier for programs, for example model_not_found."""


class OpenAIErrorBody(OpenAISchema):
    """Body of every error on the paths of OpenAI's API."""

    error: OpenAIErrorDetail
    """The error."""


class ModelCard(OpenAISchema):
    """One model that a request may name."""

    id: str
    """Its name."""
    object: Literal["model"] = "model"
    """Type of the object."""
    created: int
    """Start of the daemon, Unix time in seconds."""
    owned_by: str = "streamlearn"
    """Who serves it."""


class ModelList(OpenAISchema):
    """Response of GET /v1/models."""

    object: Literal["list"] = "list"
    """Type of the object."""
    data: tuple[ModelCard, ...]
    """The models."""


class StreamOptions(OpenAISchema):
    """Options of a streamed answer."""

    include_usage: StrictBool | None = False
    """Whether a last event holds the usage of the whole request."""


_NON_EMPTY = {"type": "string", "minLength": 1}
_STOP = {**_NON_EMPTY, "maxLength": MAX_STOP_CHARS}


def _part_schema(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    properties = {"type": {"const": kind}, kind: value}
    return {"type": "object", "properties": properties, "required": ["type", kind], "additionalProperties": False}


_URL = {"url": {"type": "string", "pattern": "^data:[a-z/+.-]*;base64,"}, "detail": {}}
_IMAGE_URL = {"type": "object", "properties": _URL, "required": ["url"], "additionalProperties": False}
_PARTS = {"anyOf": [_part_schema("text", {"type": "string"}), _part_schema("image_url", _IMAGE_URL)]}


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


class _AnswerRequest(OpenAISchema):
    """What both kinds of request have in common."""

    model: Annotated[str, StringConstraints(min_length=1)]
    """Name of a model, as GET /v1/models lists them."""
    stream: StrictBool | None = False
    """Whether to answer with server-sent events, while the text is generated."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    temperature: Annotated[float, Field(ge=0, le=2), BeforeValidator(require_number)] | None = 1.0
    """Divides the logits; 0 is greedy decoding."""
    top_p: Annotated[float, Field(ge=0, le=1), BeforeValidator(require_number)] | None = 1.0
    """Tokens are sampled from the fewest, most likely first, whose probabilities sum to it."""
    seed: Annotated[int, Field(ge=-(1 << 53), le=1 << 53), BeforeValidator(require_number)] | None = None
    """An integer that every JSON reader keeps exactly; random when absent. The same seed, request and
    `system_fingerprint` give the same text."""
    stop: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)], ...],
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_texts),
        WithJsonSchema(
            {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]}
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

    def sampling(self) -> Sampling | None:
        """How tokens are chosen, with a random seed where the request has none; None: greedily."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature == 0:
            return None
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**63
        return Sampling(temperature, 1.0 if self.top_p is None else self.top_p, seed)


def _config(example: dict[str, Any]) -> ConfigDict:
    return ConfigDict(
        json_schema_extra={"additionalProperties": False, "examples": [{"model": DEFAULT_NAME, **example}]}
    )


class TextCompletionRequest(_AnswerRequest):
    """A text to continue."""

    model_config = _config({"prompt": "The capital of France is", "max_tokens": 8})

    prompt: Annotated[
        str,
        StringConstraints(min_length=1),
        BeforeValidator(_one_text),
        WithJsonSchema({"anyOf": [_NON_EMPTY, {"type": "array", "items": _NON_EMPTY, "minItems": 1, "maxItems": 1}]}),
    ]
    """Text to continue, or a list with one."""
    default_tokens: ClassVar[int | None] = 16  # as OpenAI


class ChatTurn(OpenAISchema):
    """One turn of a conversation."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    role: Role
    """Who wrote it."""
    content: Annotated[
        str | tuple[dict[str, Any], ...],
        BeforeValidator(_text_or_parts),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PARTS}]}),
    ]
    """Text, or parts of type text and image_url, the latter with data: URLs and for backbones that read images."""


class ChatCompletionRequest(_AnswerRequest):
    """A conversation to answer."""

    model_config = _config({"messages": [{"role": "user", "content": "Capital of France?"}]})

    messages: Annotated[tuple[ChatTurn, ...], Field(min_length=1)]
    """The conversation so far."""
    max_completion_tokens: PositiveCount | None = None
    """The newer name of `max_tokens`; if both are given, this one counts."""

    @property
    def token_limits(self) -> dict[str, int]:
        newer = {} if self.max_completion_tokens is None else {"max_completion_tokens": self.max_completion_tokens}
        return super().token_limits | newer


def conversation_of(messages: Sequence[ChatTurn]) -> PromptInput:
    """The messages as the decoder of records reads them.

    Parts of type `text` and `image_url` become strings and `{"type": "image"}` parts. Texts without an image among them
    are joined by line breaks, as vLLM joins them for templates that expect strings.

    Raises:
        ApiError: 400, a message has a field such as tool_calls, an image that is not a data: URL, or another part.
    """
    turns: list[dict[str, Any]] = []
    images: list[str] = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        for name, value in (message.model_extra or {}).items():
            if value not in (None, [], {}):  # clients send back the empty fields of an answer
                raise _unsupported(f"{field}.{name}", "not supported, expected only role and content")
        turns.append({"role": message.role, "content": _content(message.content, f"{field}.content", images)})
    return PromptInput(None, tuple(turns), images or None)


def _content(content: str | Sequence[Mapping[str, Any]], field: str, images: list[str]) -> str | list[dict[str, str]]:
    """The content of a turn; its images are appended to `images`."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text), **further} if not further:
                parts.append({"type": "text", "text": text})
            case {"type": "image_url", "image_url": {"url": str(url), **options}, **further} if not (
                further or options.keys() - {"detail"}
            ):
                head, comma, data = url.partition(",")
                if not (comma and head.startswith("data:") and head.endswith(";base64")):
                    message = f"expected data:image/png;base64,..., because nothing is downloaded, found {url[:40]!r}"
                    raise _unsupported(f"{field}[{index}].image_url.url", message)
                parts.append({"type": "image"})
                images.append(data)
            case _:
                expected = '{"type": "text", "text": ...} or {"type": "image_url", "image_url": {"url": ...}}'
                raise _unsupported(f"{field}[{index}]", f"expected {expected}")
    has_images = any(part["type"] == "image" for part in parts)
    return parts if has_images else "\n".join(part["text"] for part in parts)


def _unsupported(field: str, message: str) -> ApiError:
    return ApiError(400, "unsupported_content", f"{field}: {message}", param=field)


# Many clients send every field of OpenAI's API. A field that the daemon has no use for is accepted if it has no effect
# on the answer, or with a value that requests nothing. With any other value it is refused: the answer would not be what
# was asked for.
_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
"""Values that request nothing, besides null."""


def refuse_unsupported(fields: Mapping[str, Any], supported: Iterable[str]) -> None:
    """Check the fields of a request that its model does not know.

    Raises:
        ApiError: 400 with the name of a field that would change the answer, or that the API does not have.
    """
    for name, value in fields.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name in _NEUTRAL:
            # The type too: False equals 0, and `logprobs: 0` requests something.
            if value is None or any(value == idle and type(value) is type(idle) for idle in _NEUTRAL[name]):
                continue
            message, hint = f"{name}: not supported by this server", "leave it out"
        else:
            near = difflib.get_close_matches(name, list(supported), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            message = f"{name[:80]}: unknown field"
        raise ApiError(400, "unsupported_parameter", message, hint=hint, param=name[:80])


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
    step: int
    route: Route
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
            system_fingerprint=f"step-{self.step}",
            route=self.route,
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
            async with asyncio.timeout_at(ends):  # not around a yield: each part may run in a task of its own
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
                writer = self._writer(body, start.step, start.route)
                wants_usage = bool(body.stream_options and body.stream_options.include_usage)
                events = _events(parts, writer, wants_usage=wants_usage)
                return EventStreamResponse(events, parts.aclose, _headers(writer))
            result = await wait_for_result(request.receive, self._jobs.submit(job), self._deadline_s)
        except RecordError as error:
            field = "prompt" if job.prompt is not None else "messages"
            raise ApiError(400, error.reason, str(error), param=field) from error
        assert isinstance(result, GenerateResult), "a generation ends with its text"
        writer = self._writer(body, result.step, result.route)
        response.headers.update(_headers(writer))
        return writer.whole(result)

    def _job(self, body: TextCompletionRequest | ChatCompletionRequest) -> GenerateJob:
        require_ready(self._board)
        requested = self._requested(body.model)
        refuse_unsupported(body.model_extra or {}, type(body).model_fields)
        if isinstance(body, ChatCompletionRequest):
            given = conversation_of(body.messages)
        else:
            given = PromptInput(body.prompt, None)
        limit = self._settings.max_new_tokens
        tokens = min(limit, body.default_tokens or limit)
        for field, number in body.token_limits.items():
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

    def _writer(self, body: TextCompletionRequest | ChatCompletionRequest, step: int, route: Route) -> _Writer:
        chat = isinstance(body, ChatCompletionRequest)
        model = ModelNames(self._name, self._board.read().backbone).answered_by(route)
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        return _Writer(chat, model, step, route, answer_id, int(self._clock.wall()))


def _regimes(status: Status) -> list[int]:
    """Numbers of the regimes that can be asked to answer."""
    return [regime.number for regime in status.adaptation.regimes] if status.adaptation.routes_by_regime else []


def _headers(writer: _Writer) -> dict[str, str]:
    return answer_headers(writer.model, writer.route.regime, writer.route.score)


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
