"""Request bodies, snapshot listings and errors, as the OpenAPI document shows them."""

from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, StringConstraints, model_validator
from pydantic.config import JsonDict

from streamlearn.jobs.results import Body


def _a_number(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("a number must stand here")
    return value


Count = Annotated[int, Field(gt=0), BeforeValidator(_a_number)]
"""A whole number, not a text or a truth that could be read as one."""
_GIVEN: JsonDict = {"not": {"type": "null"}}
_ABSENT: JsonDict = {"type": "null"}


class EvalRequest(Body):
    """Examples to measure the model on, as it is now. Training is not changed by a bit."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "examples": [
                        {"prompt": "Capital of France?", "completion": " Paris"},
                        {"text": "The Nile flows north."},
                    ],
                    "generate": True,
                    "max_new_tokens": 16,
                }
            ]
        }
    )

    examples: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """Records, each {"text"}, {"prompt", "completion"}, {"messages": [...]} or {"input_ids", ["labels"]}."""
    generate: StrictBool = False
    """Also generate an answer to each example, for exact match and ROUGE-L."""
    max_new_tokens: Count | None = None
    """Longest generated answer, tokens; the configured bound when absent."""


class Message(Body):
    """One turn of a conversation."""

    role: Annotated[str, StringConstraints(min_length=1)]
    """For example system, user or assistant."""
    content: str | tuple[dict[str, str], ...]
    """What was said; or parts {"type": "image"} and {"type": "text", "text": ...} where images stand in it."""


class GenerateRequest(Body):
    """A prompt to continue or a conversation to answer, exactly one of the two."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "The capital of France is", "max_new_tokens": 8},
                {"messages": [{"role": "user", "content": "Capital of France?"}]},
            ],
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": _GIVEN, "messages": _ABSENT}},
                {"required": ["messages"], "properties": {"messages": _GIVEN, "prompt": _ABSENT}},
            ],
        }
    )

    prompt: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Text to continue."""
    messages: Annotated[tuple[Message, ...], Field(min_length=1)] | None = None
    """Conversation to answer."""
    image: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """JPEG, PNG or WebP in base64, or several; they stand where the prompt says <image>, or before it."""
    max_new_tokens: Count | None = None
    """Tokens to add at most; the configured bound when absent."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            found = "neither" if self.prompt is None else "both"
            raise ValueError(f"exactly one of prompt and messages must be given, found {found}")
        return self


class SnapshotRow(Body):
    """A snapshot on disk."""

    name: str
    """Its folder's name."""
    step: int
    """Updates that it holds."""
    written_at: datetime
    """When it became durable."""
    size_bytes: int | None = None
    """Of all its files, when known."""


class SnapshotList(Body):
    """Snapshots on disk, the newest first."""

    snapshots: tuple[SnapshotRow, ...]


class ErrorDetail(Body):
    """What went wrong."""

    code: str
    """Stable and for programs, for example queue_full."""
    message: str
    """What must hold, what was found, where."""
    hint: str
    """What to do."""


class ErrorBody(Body):
    """The one shape of every answer that is not a success."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": {
                        "code": "queue_full",
                        "message": "at most 8 jobs may wait and 8 do",
                        "hint": "try again after the seconds in Retry-After",
                    }
                }
            ]
        }
    )

    error: ErrorDetail
