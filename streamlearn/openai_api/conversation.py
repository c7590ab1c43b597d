"""Conversations as the decoder of records reads them: texts, places of images, and the images.

OpenAI's parts of type `text` and `image_url` become strings and `{"type": "image"}` parts. Texts without an image among
them are joined by line breaks, as vLLM joins them for templates that expect strings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamlearn.openai_api.request_fields import ChatMessage


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
