"""Requests and responses of OpenAI's paths, as the OpenAPI document describes them, and what requests may hold."""

import difflib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StringConstraints, WithJsonSchema

from streamlearn.http.responses import ApiError
from streamlearn.jobs.queue import PromptInput, Sampling
from streamlearn.serve.models import PositiveCount, require_number
from streamlearn.settings.records import Role
from streamlearn.status import Route

DEFAULT_NAME = "streamlearn"
DEFAULT_TEXT_TOKENS = 16
"""Maximum number of tokens of a continued text whose request has none, as OpenAI's."""
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
