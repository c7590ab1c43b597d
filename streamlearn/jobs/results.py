"""Result of each kind of job, as HTTP returns it and the OpenAPI document describes it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from streamlearn.status import Route

FinishReason = Literal["stop", "length"]


class ApiModel(BaseModel):
    """Base class of request and response models: frozen, no unknown fields, docstrings as field descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ExampleResult(ApiModel):
    """The result of one example of an evaluation."""

    loss: float
    """Mean over the example's scored tokens, nats per token."""
    tokens: int
    """Scored tokens."""
    output: str | None = None
    """Generated text; null without generate."""
    route: Route
    """Its regime, and what computed the loss and the output."""


class EvalResult(ApiModel):
    """Evaluation of the request's examples on the weights of one step."""

    step: int
    """Optimizer updates made before the job."""
    examples: int
    """Number of examples."""
    tokens: int
    """Scored tokens."""
    loss: float
    """Mean over all scored tokens, nats per token."""
    perplexity: float
    """exp(loss)."""
    token_accuracy: float
    """Share of scored tokens that were the most probable ones, 0 to 1."""
    exact_match: float | None = None
    """Share of generated answers that equal the expected one, 0 to 1; null without generate."""
    rouge_l: float | None = None
    """Mean ROUGE-L F1 of the generated answers, 0 to 1; null without generate."""
    num_known: int
    """Examples that a regime explains."""
    num_unknown: int
    """Examples that no regime explains."""
    answered_by: dict[str, int]
    """Number of examples by what computed them: regime, adapter or backbone."""
    per_example: tuple[ExampleResult, ...]
    """In the order of the request."""
    seconds: float
    """Time spent on the job, not counting the time in the queue."""


class GenerateResult(ApiModel):
    """Generated text."""

    step: int
    """Optimizer updates made before the job."""
    text: str
    """The continuation, without the prompt."""
    tokens: int
    """Generated tokens."""
    prompt_tokens: int
    """Tokens of the prompt."""
    finish_reason: FinishReason
    """stop: the text ended by itself or with a stop string; length: at the maximum number of tokens."""
    route: Route
    """The prompt's regime, and what generated the text."""
    seconds: float
    """Time spent on the job, not counting the time in the queue."""


class RouteResult(ApiModel):
    """Regimes of prompts, and what would answer them."""

    step: int
    """Optimizer updates made before the prompts were routed."""
    routes: tuple[Route, ...]
    """In the order of the request."""
    seconds: float
    """Time spent on the job, not counting the time in the queue."""


class SnapshotResult(ApiModel):
    """A new durable snapshot."""

    name: str
    """Name of its folder."""
    step: int
    """Optimizer updates in it."""


class ControlResult(ApiModel):
    """A control that was carried out, and what holds now."""

    control: str
    """What was asked: pause, resume, pin, unpin, rollback, freeze, unfreeze, rename or drop."""
    changed: bool
    """Whether it changed anything; false when it was so already."""
    paused: bool
    """Whether the daemon takes no step and reads no record."""
    pinned: tuple[str, ...]
    """Names of the snapshots that are never pruned."""
    skipped_records: tuple[str, ...]
    """Offsets that are never trained on, as TOPIC:PARTITION:FROM..TO with both ends included."""
    moved_aside: tuple[str, ...] = ()
    """Names of the snapshots that a rollback moved aside, newest first."""
    snapshot: str | None
    """Name of the newest snapshot; null before the first."""


Result = EvalResult | GenerateResult | RouteResult | SnapshotResult | ControlResult
