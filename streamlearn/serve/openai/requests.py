"""Requests on OpenAI's paths, with the fields that the daemon decodes by."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema

from streamlearn.jobs.queue import Sampling
from streamlearn.jobs.stop_strings import MAX_CHARS, MAX_STRINGS
from streamlearn.openai_api import request_fields as shared
from streamlearn.serve.schemas import PositiveCount, require_number
from streamlearn.stream.decode import Role

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
