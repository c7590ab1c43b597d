"""Request bodies, snapshot listings and errors, as the OpenAPI document describes them."""

from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, StringConstraints, model_validator
from pydantic.config import JsonDict

from streamlearn.jobs.results import ApiModel
from streamlearn.stream.offset_range import PATTERN


def require_number(value: object) -> object:
    """Return the value, which must not be a string or a boolean."""
    if isinstance(value, bool | str):
        raise ValueError("expected a number")
    return value


Responses = dict[int | str, dict[str, Any]]
"""Descriptions of responses, by status."""

PositiveCount = Annotated[int, Field(gt=0), BeforeValidator(require_number)]
"""A positive integer; strings and booleans are not converted."""
_GIVEN: JsonDict = {"not": {"type": "null"}}
_ABSENT: JsonDict = {"type": "null"}


class EvalRequest(ApiModel):
    """Examples to evaluate the current model on. They do not affect training."""

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
    max_new_tokens: PositiveCount | None = None
    """Maximum length of a generated answer, tokens; serve.max_new_tokens when absent."""


class Message(ApiModel):
    """One turn of a conversation."""

    role: Annotated[str, StringConstraints(min_length=1)]
    """For example system, user or assistant."""
    content: str | tuple[dict[str, str], ...]
    """Text, or a list of {"type": "image"} and {"type": "text", "text": ...} parts where it contains images."""


_ONE_OF_TWO: JsonDict = {
    "oneOf": [
        {"required": ["prompt"], "properties": {"prompt": _GIVEN, "messages": _ABSENT}},
        {"required": ["messages"], "properties": {"messages": _GIVEN, "prompt": _ABSENT}},
    ]
}


class PromptRequest(ApiModel):
    """Exactly one of a prompt to continue and a conversation to answer."""

    model_config = ConfigDict(json_schema_extra=_ONE_OF_TWO)

    prompt: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Text to continue."""
    messages: Annotated[tuple[Message, ...], Field(min_length=1)] | None = None
    """Conversation to answer."""
    image: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """One or several JPEG, PNG or WebP images in base64. Each replaces an <image> of the prompt, or precedes it."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            found = "neither" if self.prompt is None else "both"
            raise ValueError(f"expected exactly one of prompt and messages, found {found}")
        return self


class GenerateRequest(PromptRequest):
    """Exactly one of a prompt to continue and a conversation to answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "The capital of France is", "max_new_tokens": 8},
                {"messages": [{"role": "user", "content": "Capital of France?"}]},
            ],
            **_ONE_OF_TWO,
        }
    )

    max_new_tokens: PositiveCount | None = None
    """Maximum number of tokens to generate; serve.max_new_tokens when absent."""


class RouteRequest(ApiModel):
    """Prompts whose regimes are asked for."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "prompts": [
                        {"prompt": "The capital of France is"},
                        {"messages": [{"role": "user", "content": "Capital of France?"}]},
                    ]
                }
            ]
        }
    )

    prompts: Annotated[tuple[PromptRequest, ...], Field(min_length=1)]
    """As in a request to /v1/generate."""


class RollbackRequest(ApiModel):
    """What a rollback leaves out."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"skip_records": ["orders:0:118..122"]}]})

    skip_records: Annotated[
        tuple[Annotated[str, StringConstraints(pattern=PATTERN, max_length=300)], ...], Field(max_length=60)
    ] = ()
    """Offsets that are never trained on, each TOPIC:PARTITION:FROM..TO with both ends included; FROM..TO is enough
    where the stream has one partition."""


class RenameRequest(ApiModel):
    """A name for a regime."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "refunds"}]})

    name: Annotated[str, StringConstraints(max_length=64)]
    """The new name."""


class SnapshotRow(ApiModel):
    """A snapshot on disk."""

    name: str
    """Name of its folder."""
    step: int
    """Optimizer updates in it."""
    written_at: datetime
    """When it became durable."""
    size_bytes: int | None = None
    """Size of all its files; null when unknown."""
    pinned: bool = False
    """Whether it is kept from being pruned."""


class SnapshotList(ApiModel):
    """Snapshots on disk, newest first."""

    snapshots: tuple[SnapshotRow, ...]
    """The snapshots."""


class ErrorDetail(ApiModel):
    """Description of an error."""

    code: str
    """Stable identifier for programs, for example queue_full."""
    message: str
    """What was expected, what was found, and where."""
    hint: str
    """What to do."""


class ErrorBody(ApiModel):
    """Body of every error response."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": {
                        "code": "queue_full",
                        "message": "at most 8 jobs may be queued, found 8",
                        "hint": "retry after the seconds in Retry-After",
                    }
                }
            ]
        }
    )

    error: ErrorDetail
    """The error."""


JOB_ERRORS: Responses = {
    400: {"model": ErrorBody, "description": "Invalid JSON, an unusable record, or a Host that is not allowed."},
    401: {"model": ErrorBody, "description": "The bearer token is missing or wrong."},
    403: {"model": ErrorBody, "description": "The Origin header names a foreign site."},
    413: {"model": ErrorBody, "description": "The body is larger than serve.max_body_bytes."},
    415: {"model": ErrorBody, "description": "The content type is not application/json."},
    422: {"model": ErrorBody, "description": "A field is missing, unknown or out of range; the message names it."},
    500: {"model": ErrorBody, "description": "The job failed inside the daemon."},
    503: {"model": ErrorBody, "description": "The queue is full or the daemon is not ready; see Retry-After."},
    504: {"model": ErrorBody, "description": "The job did not finish in time and was cancelled."},
}
"""Errors of every job."""

CONTROL_ERRORS: Responses = {
    **{status: JOB_ERRORS[status] for status in (401, 403, 413, 415, 422)},
    400: {"model": ErrorBody, "description": "Invalid JSON, or a Host that is not allowed."},
    409: {"model": ErrorBody, "description": "The control is refused, and nothing was changed; the message says why."},
    500: {"model": ErrorBody, "description": "The control failed inside the daemon; the message says what holds."},
    503: {"model": ErrorBody, "description": "Too many controls wait, or the daemon is not ready; see Retry-After."},
    504: {
        "model": ErrorBody,
        "description": "Not begun in time, and cancelled; or not finished in time, and completed later.",
    },
}
"""Errors of every control."""
