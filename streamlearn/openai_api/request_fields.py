"""What every server of the API reads of a request; other fields are kept in `model_extra`, unread."""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StringConstraints

from streamlearn.openai_api.schema import OpenAISchema


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
