"""What clients send and get: jobs and their results, snapshots, errors, as OpenAPI shows them."""

from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StringConstraints, model_validator
from pydantic.config import JsonDict


class Body(BaseModel):
    """Frozen; unknown fields refused; a field's docstring is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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


class ExampleResult(Body):
    """One example's part of an eval."""

    loss: float
    """Mean over the example's scored tokens, nats per token."""
    tokens: int
    """Tokens that were scored."""
    output: str | None = None
    """What was generated, when asked for."""


class EvalResult(Body):
    """The model at one step, measured on the request's examples."""

    step: int
    """Updates that the model had seen."""
    examples: int
    """Examples measured."""
    tokens: int
    """Tokens that were scored."""
    loss: float
    """Mean over all scored tokens, nats per token."""
    perplexity: float
    """exp(loss)."""
    token_accuracy: float
    """Share of scored tokens that were the most probable one, 0 to 1."""
    exact_match: float | None = None
    """Share of generated answers that equal the example's, 0 to 1; null without generate."""
    rouge_l: float | None = None
    """Mean ROUGE-L F1 of the generated answers, 0 to 1; null without generate."""
    per_example: tuple[ExampleResult, ...]
    """In the request's order."""
    seconds: float
    """Time spent on the job, waiting not included."""


class GenerateResult(Body):
    """What the model wrote."""

    step: int
    """Updates that the model had seen."""
    text: str
    """The continuation, without the prompt."""
    tokens: int
    """Tokens added."""
    seconds: float
    """Time spent on the job, waiting not included."""


class SnapshotResult(Body):
    """A snapshot that is durable now."""

    name: str
    """Its folder's name."""
    step: int
    """Updates that it holds."""


class ExpertsOfRegime(Body):
    """What one regime has to do with the experts of a layer; rows are heads, columns experts."""

    regime: int
    """Its number."""
    similarity: list[list[float]] | None = None
    """CKA of each expert with the regime's transient expert, 0 to 1; null when it was not probed."""
    claimed: list[list[int]] | None = None
    """Experts of each head that it may use; null when it may use all."""
    holdout_tokens: list[list[int]] | None = None
    """Tokens of its hold-out records that each expert gets now; null when it has none."""


class LayerExperts(Body):
    """The experts beside one linear; rows are heads, columns experts."""

    layer: str
    """The linear's name in the backbone."""
    load: list[list[int]] | None
    """Tokens that each was trained on (sequences where those are routed); null where nothing is routed."""
    share: list[list[float]] | None
    """The same as a part of its head's, 0 to 1."""
    importance: list[list[float]] | None
    """Mean importance of its weights, which the anchors hold it by; null where nothing is held."""
    effective_number: list[list[float]] | None = None
    """Kinds of tokens that share it (MH-MoE eq. 9), from 1 to `compositions`; 0 for one that got none."""
    mean_effective_number: float | None = None
    """Over all experts, by the tokens that they got."""
    regimes: tuple[ExpertsOfRegime, ...]
    """Those that are remembered, by number."""


class ExpertsResult(Body):
    """The experts at one step."""

    step: int
    """Updates that the model had seen."""
    layers: tuple[LayerExperts, ...]
    """In the backbone's order."""
    holdout_records: int
    """Records over which tokens and effective numbers were taken."""
    holdout_tokens: int
    """Their tokens."""
    compositions: int
    """Kinds of tokens that are told apart: by frequency and by position."""
    unmeasured: str | None
    """Why effective numbers are null; null when they are there."""
    seconds: float
    """Time spent on the job, waiting not included."""


Result = EvalResult | GenerateResult | SnapshotResult | ExpertsResult


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
