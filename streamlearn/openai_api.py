"""Headers that say what answered a request."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StringConstraints

from streamlearn.regimes.route import Requested


def answer_headers(model: str, regime: int | None, score: float | None) -> dict[str, str]:
    """The model that answered, the likeliest regime of the prompt, and how well that explains it, 0 to 1.

    Names of models are percent-encoded where a header cannot hold them. What is None has no header.
    """
    headers = {"x-streamlearn-model": quote(model, safe="/:@+,=~ ")}
    if score is not None:
        headers["x-streamlearn-score"] = repr(score)
    if regime is not None:
        headers["x-streamlearn-regime"] = str(regime)
    return headers


class OpenAISchema(BaseModel):
    """An object of the API: frozen, further fields are kept, docstrings are the descriptions of fields."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)


class StreamOptions(OpenAISchema):
    """Options of a streamed answer."""

    include_usage: StrictBool | None = False
    """Whether a last event holds the usage of the whole request."""


class ModelRequest(OpenAISchema):
    """What both kinds of request have in common."""

    model: Annotated[str, StringConstraints(min_length=1)]
    """Name of a model, as GET /v1/models lists them."""
    stream: StrictBool | None = False
    """Whether to answer with server-sent events, while the text is generated."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with an event that holds the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class PromptedRequest(ModelRequest):
    """A request to /v1/completions."""

    prompt: str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...]
    """Text to continue, several texts, or their token ids."""


class ChatMessage(OpenAISchema):
    """One turn of a conversation."""

    role: Annotated[str, StringConstraints(min_length=1)]
    """For example system, user or assistant."""
    content: str | tuple[dict[str, Any], ...] | None = None
    """Text, or parts such as {"type": "text", "text": ...} and {"type": "image_url", "image_url": {"url": ...}}."""


class ChatRequest(ModelRequest):
    """A request to /v1/chat/completions."""

    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1)]
    """The conversation to answer."""


# Conversations as the decoder of records reads them: texts, places of images, and the images.
#
# OpenAI's parts of type `text` and `image_url` become strings and `{"type": "image"}` parts. Texts without an image
# among them are joined by line breaks, as vLLM joins them for templates that expect strings.


class UnreadableMessageError(ValueError):
    """A message holds something that cannot be read here."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns with `role` and `content`, and the images in their order."""

    turns: tuple[dict[str, Any], ...]
    images: tuple[str, ...]
    """In base64."""


def conversation_of(messages: Sequence[ChatMessage]) -> Conversation:
    """Read OpenAI's messages.

    Raises:
        UnreadableMessageError: a message has no text, a further field such as tool_calls, an image that is not a data:
            URL, or a part that is neither text nor an image.
    """
    turns: list[dict[str, Any]] = []
    images: list[str] = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        for name, value in (message.model_extra or {}).items():
            if value not in (None, [], {}):  # clients send back the empty fields of an answer
                raise UnreadableMessageError(f"{field}.{name}", "not supported, expected only role and content")
        if message.content is None:
            raise UnreadableMessageError(f"{field}.content", "expected text, found none")
        content, of_message = _content(message.content, f"{field}.content")
        turns.append({"role": message.role, "content": content})
        images += of_message
    return Conversation(tuple(turns), tuple(images))


def _content(
    content: str | Sequence[Mapping[str, Any]], field: str
) -> tuple[str | list[dict[str, str]], Sequence[str]]:
    if isinstance(content, str):
        return content, ()
    parts: list[dict[str, str]] = []
    images: list[str] = []
    for index, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text), **further} if not further:
                parts.append({"type": "text", "text": text})
            case {"type": "image_url", "image_url": {"url": str(url), **options}, **further} if not (
                further or options.keys() - {"detail"}
            ):
                parts.append({"type": "image"})
                images.append(_base64_of(url, f"{field}[{index}].image_url.url"))
            case _:
                expected = '{"type": "text", "text": ...} or {"type": "image_url", "image_url": {"url": ...}}'
                raise UnreadableMessageError(f"{field}[{index}]", f"expected {expected}")
    return (parts, images) if images else ("\n".join(part["text"] for part in parts), ())


def _base64_of(url: str, field: str) -> str:
    """The data of a data: URL in base64."""
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        message = f"expected data:image/png;base64,..., because nothing is downloaded, found {url[:40]!r}"
        raise UnreadableMessageError(field, message)
    return data


# Errors in OpenAI's form, as an OpenAPI document describes them; `http.replies` writes them.
#
# {"error": {"message": "...", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}}


class OpenAIErrorDetail(OpenAISchema):
    """Description of an error."""

    message: str
    """What was expected, what was found, and what to do."""
    type: Literal["invalid_request_error", "server_error"]
    """invalid_request_error: change the request; server_error: try again later."""
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
    """Unix time, in seconds."""
    owned_by: str = "streamlearn"
    """Who serves it."""


class ModelList(OpenAISchema):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    """Type of the object."""
    data: tuple[ModelCard, ...]
    """The models."""

    @classmethod
    def of(cls, names: Iterable[str], created: int) -> "ModelList":
        """The list of models with these names, all created at the same time."""
        return cls(data=tuple(ModelCard(id=name, created=created) for name in names))


DEFAULT_NAME = "streamlearn"


@dataclass(frozen=True, slots=True)
class NamedModels:
    """The names under one `name`, beside that of the backbone.

    >>> names = NamedModels("streamlearn", "HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> names.requested("streamlearn-regime-3")
    3
    """

    name: str
    """Each prompt is answered by what routing finds for it."""
    backbone: str
    """The untouched backbone."""

    def of_regime(self, number: int) -> str:
        """Name of a regime's model."""
        return f"{self.name}-regime-{number}"

    def of_answer(self, answered_by: str, regime: int | None) -> str:
        """Name of what answered: a regime's model, the backbone, or what no request can name, such as a mean."""
        if answered_by == "backbone":
            return self.backbone
        if answered_by == "regime" and regime is not None:
            return self.of_regime(regime)
        return f"{self.name}-{answered_by}"

    def listed(self, regimes: Iterable[int]) -> list[str]:
        """All names, given the numbers of the regimes."""
        return [self.name, self.backbone, *(self.of_regime(number) for number in regimes)]

    def requested(self, model: str) -> Requested | None:
        """What the name of a model asks for; None for any other name."""
        if model == self.name:
            return "routed"
        if model == self.backbone:
            return "backbone"
        match = re.fullmatch(rf"{re.escape(self.name)}-regime-([1-9][0-9]{{0,17}})", model)
        return int(match[1]) if match else None


DONE = b"data: [DONE]\n\n"
"""The last event of a complete answer."""
MEDIA_TYPE = "text/event-stream"


def event(content: BaseModel | dict[str, Any]) -> bytes:
    """One event with a JSON object."""
    value = content.model_dump() if isinstance(content, BaseModel) else content
    return b"data: " + orjson.dumps(value) + b"\n\n"
