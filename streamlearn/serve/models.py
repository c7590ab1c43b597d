"""Request bodies, snapshot listings and errors, as the OpenAPI document describes them."""

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Annotated, Any, Self, TypeVar

import orjson
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict

from streamlearn.board import Board, Clock
from streamlearn.jobs.queue import ApiModel
from streamlearn.series import DeadLetterRow, HistoryPoint, HistoryStatus, RegimeSegment, SnapshotMark
from streamlearn.status import (
    ANSWERED_BY,
    SHIFT_KINDS,
    AdaptationStatus,
    FallbackStatus,
    ForgettingMeans,
    Phase,
    Progress,
    PublicationStatus,
    PublishedVersions,
    RegimeExperts,
    RegimeStatus,
    ShiftStatus,
    Status,
)
from streamlearn.stream.position import PATTERN


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


class RouteRequest(ApiModel):
    """Prompts to route."""

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
    """Prompts or conversations."""


class RollbackRequest(ApiModel):
    """Options of a rollback."""

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
    """What must hold, what was found, and where."""
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


class Liveness(ApiModel):
    """The daemon is alive."""

    alive: bool
    """Always true; otherwise the response is a 503."""
    heartbeat_age_s: float
    """Time since the training loop last reported."""
    heartbeat_bound_s: float
    """Maximum age of the last report in this phase."""


class Readiness(ApiModel):
    """The daemon accepts jobs."""

    ready: bool
    """Always true; otherwise the response is a 503."""
    phase: Phase
    """Phase of the training loop."""
    step: int
    """Optimizer updates made."""


class LossView(ApiModel):
    """Prequential loss: each batch is scored before its update. Nats per token."""

    last: float | None
    """Loss of the last batch."""
    smoothed: float | None
    """Smoothed over recent batches."""


class SnapshotView(ApiModel):
    """The newest durable snapshot."""

    name: str
    """Name of its folder."""
    step: int
    """Optimizer updates in it."""
    written_at: datetime
    """When it became durable."""
    age_s: float
    """Time since then."""


class JobsView(ApiModel):
    """The job queue: evaluations, generations, expert usage, snapshots."""

    waiting: int
    """Queued jobs."""
    capacity: int
    """Maximum number of queued jobs."""


class RequestsView(ApiModel):
    """Prompts and examples of finished evaluations and generations of this process."""

    known: int
    """That a regime explained."""
    unknown: int
    """That no regime explained."""
    answered_by: dict[str, int]
    """Number by what answered: regime, adapter (where routing does not depend on regimes), mean or
    backbone."""
    unknown_answered_by: dict[str, int]
    """The part of them that no regime explained; regime is then the nearest, or the one that the request named."""


def _describe_inherited(schema: dict[str, Any], view: type) -> None:
    """Add the descriptions of inherited fields; pydantic reads the docstrings of the class itself."""
    for base in view.__mro__[1:-1]:
        for name, value in TypeAdapter(base).json_schema()["properties"].items():
            schema["properties"][name] |= {"description": value["description"]} if "description" in value else {}


# Views of the status are its own dataclasses with further fields: a value is declared once, in `status`.
_VIEW = ConfigDict(
    use_attribute_docstrings=True,
    extra="forbid",
    json_schema_extra=_describe_inherited,
    json_schema_serialization_defaults_required=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgettingView(ForgettingMeans):
    """Forgetting on the hold-out records: each regime's accuracy now compared with earlier."""

    __pydantic_config__ = _VIEW

    loss_by_regime: dict[str, float]
    """Hold-out loss of each regime at its newest scoring, nats per learned token, by regime number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimesView(ForgettingMeans):
    """Remembered regimes by number, and forgetting."""

    __pydantic_config__ = _VIEW

    current: int | None
    """Number of the regime that the stream is in."""
    regimes: tuple[RegimeStatus, ...]
    """Remembered regimes."""


class ShiftsView(ApiModel):
    """Detected shifts, oldest first; only the newest of a long history."""

    total: dict[str, int]
    """Shifts ever detected, by kind; the first regime is not counted."""
    shifts: tuple[ShiftStatus, ...]
    """The newest shifts. The first entry of a run is its first regime, with `previous` null."""


class ExpertsView(ApiModel):
    """How tokens are routed among the experts of each head, by regime."""

    regimes: tuple[RegimeExperts, ...]
    """Regimes that this process trained; empty for presets that route nothing, such as the default."""
    effective_regimes: float | None
    """How many regimes an expert serves: exp of the entropy of the regime given the expert, mean over experts weighted
    by their tokens (MH-MoE eq. 7 to 9). 1: every expert has a regime of its own. Null unless regimes share experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationView(PublishedVersions):
    """Published version of each regime, versions held back and why, and the replicas."""

    __pydantic_config__ = _VIEW

    enabled: bool
    """Whether the configuration has a section `publish`; if not, the rest is empty."""
    written_at: datetime | None
    """When it was written."""
    published: int
    """Versions published by this process."""
    held_back: dict[str, int]
    """Versions held back by this process, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView(Progress):
    """The daemon at one moment. Counts are over the learner's lifetime, across restarts."""

    __pydantic_config__ = _VIEW

    ready: bool
    """Whether the daemon accepts jobs."""
    reason: str | None
    """Why the daemon is not ready; null when it is."""
    degraded: str | None
    """Failed writes (snapshots, dead letters, journal) and threads, while learning continues; null if none."""
    started_at: datetime
    """Start of the process."""
    heartbeat_age_s: float
    """Time since the training loop last reported."""
    records_dead_lettered: int
    """Unusable records, all reasons together."""
    prequential_loss_nats: LossView
    """Loss of each batch before its update, nats per token."""
    current_regime: int | None
    """Number of the regime that the stream is in; /v1/regimes lists all."""
    num_regimes: int
    """Number of remembered regimes."""
    num_shifts: dict[str, int]
    """Shifts ever detected, by kind; the first regime is not counted. /v1/shifts lists them."""
    forgetting: ForgettingView
    """Forgetting on the hold-out records."""
    probe_seconds: float
    """Time spent on probes by this process."""
    holdout_seconds: float
    """Training time spent on scoring hold-out records and canaries by this process; idle time is not counted."""
    last_snapshot: SnapshotView | None
    """The newest durable snapshot; null before the first."""
    snapshot_write_seconds: float | None
    """Duration of writing the last snapshot."""
    jobs: JobsView
    """The job queue."""
    requests: RequestsView
    """Requests by what answered them."""
    unknown_requests: FallbackStatus
    """How requests that no regime explains are answered."""
    adapter_preset: str
    """Adapter preset."""


V = TypeVar("V", ForgettingView, RegimesView, PublicationView, StatusView)


def _view(kind: type[V], source: object, **computed: Any) -> V:
    """A view whose fields are computed, or those of the source."""
    inherited = {field.name: getattr(source, field.name) for field in fields(kind) if field.name not in computed}
    return kind(**inherited, **computed)


def status_view(board: Board, jobs: JobsView, clock: Clock) -> StatusView:
    """Body of /v1/status, with ages as of now."""
    status, reason = board.read(), board.why_not_ready()
    snapshot, adaptation = status.snapshot, status.adaptation
    known = {how: number for (is_known, how), number in status.requests.items() if is_known}
    unknown = {how: number for (is_known, how), number in status.requests.items() if not is_known}
    losses = {str(regime.number): regime.now.loss for regime in adaptation.regimes if regime.now is not None}
    return _view(
        StatusView,
        status,
        ready=reason is None,
        reason=reason,
        degraded=status.faults or None,
        started_at=_utc(status.started_at),
        heartbeat_age_s=round(board.heartbeat_age_s, 3),
        dead_letters=dict(status.dead_letters),
        ignored=dict(status.ignored),
        truncated_records=dict(status.truncated_records),
        truncated_tokens=dict(status.truncated_tokens),
        tokens_per_s=round(status.tokens_per_s, 1),
        prequential_loss_nats=LossView(last=status.loss, smoothed=status.loss_smoothed),
        current_regime=adaptation.current and adaptation.current.number,
        num_regimes=len(adaptation.regimes),
        num_shifts=_totals(adaptation),
        forgetting=_view(ForgettingView, adaptation, loss_by_regime=losses),
        probe_seconds=round(adaptation.probe_seconds, 3),
        holdout_seconds=round(adaptation.holdout_seconds, 3),
        last_snapshot=snapshot
        and SnapshotView(
            name=snapshot.name,
            step=snapshot.step,
            written_at=_utc(snapshot.written_at),
            age_s=round(max(0.0, clock.wall() - snapshot.written_at), 3),
        ),
        snapshot_write_seconds=snapshot and snapshot.write_seconds,
        jobs=jobs,
        requests=RequestsView(
            known=sum(known.values()),
            unknown=sum(unknown.values()),
            answered_by={how: known.get(how, 0) + unknown.get(how, 0) for how in ANSWERED_BY},
            unknown_answered_by={how: unknown.get(how, 0) for how in ANSWERED_BY},
        ),
        unknown_requests=adaptation.fallback,
        adapter_preset=status.preset,
        versions=dict(status.versions),
    )


def regimes_view(status: Status) -> RegimesView:
    current = status.adaptation.current
    return _view(RegimesView, status.adaptation, current=current and current.number)


def shifts_view(status: Status) -> ShiftsView:
    return ShiftsView(total=_totals(status.adaptation), shifts=status.adaptation.shifts)


def publication_view(status: Status) -> PublicationView:
    publication = status.publication or PublicationStatus()
    return _view(
        PublicationView,
        publication,
        enabled=status.publication is not None,
        written_at=None if publication.written_at is None else _utc(publication.written_at),
        published=publication.num_published,
        held_back=dict(publication.num_held_back),
    )


def _totals(adaptation: AdaptationStatus) -> dict[str, int]:
    return {kind: adaptation.num_shifts.get(kind, 0) for kind in SHIFT_KINDS}


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(round(seconds, 3), UTC)


_POINT = TypeAdapter(HistoryPoint).json_schema(mode="serialization")["properties"]


def _column(value: dict[str, Any]) -> dict[str, Any]:
    items = {key: schema for key, schema in value.items() if key not in ("title", "description", "default")}
    return {"type": "array", "items": items, "description": value["description"]}


_COLUMNS: JsonDict = {
    "type": "object",
    "properties": {name: _column(value) for name, value in _POINT.items()},
    "required": list(_POINT),
}


class HistoryView(ApiModel):
    """The past of the run in bounded memory: at most 1,920 points and 384 segments, fewer for older records.

    It changes with every batch; ask with If-None-Match, and a response without a body says that nothing changed.
    """

    points: Annotated[dict[str, list[Any]], WithJsonSchema(_COLUMNS)]
    """The series along the stream: one entry in each column for each point, oldest first. A point is one batch, or an
    older stretch of several. Times, speeds, lag and requests depend on time as well as on the stream; the other
    columns are those of an uninterrupted run."""
    segments: tuple[RegimeSegment, ...]
    """Regimes along the stream, oldest first."""
    dead_letters: tuple[DeadLetterRow, ...]
    """The newest 32 unusable records, oldest first."""
    snapshots: tuple[SnapshotMark, ...]
    """The newest 32 snapshots, oldest first."""


RENDER_EVERY_S = 1.0  # a full history takes 15 ms, in a process that trains


class HistoryBody:
    """Body of /v1/history, rendered at most every `RENDER_EVERY_S` seconds for all clients together."""

    def __init__(self, board: Board, clock: Clock) -> None:
        self._board = board
        self._clock = clock
        self._history: HistoryStatus | None = None
        self._body = b""
        self._rendered_at = 0.0

    def read(self) -> bytes:
        history, now = self._board.read().history, self._clock.monotonic()
        if self._history is None or (history is not self._history and now - self._rendered_at >= RENDER_EVERY_S):
            self._history, self._rendered_at, self._body = history, now, history_body(history)
        return self._body


def history_body(history: HistoryStatus) -> bytes:
    """40,000 values: serialized without a model, which would take several times as long."""
    points = {name: [getattr(point, name) for point in history.points] for name in _POINT}
    rows = {"segments": history.segments, "dead_letters": history.dead_letters, "snapshots": history.snapshots}
    return orjson.dumps({"points": points, **rows})
