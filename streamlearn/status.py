"""The status that the loop publishes on the `board`: one immutable value.

HTTP, `/metrics`, the page and the command line are projections of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, get_args

from streamlearn.errors import StreamlearnError
from streamlearn.series import FIELD_DOCS, HistoryStatus

HELD_BACK = (
    "too_few_records",
    "worse_than_backbone",
    "worse_than_published",
    "worse_on_canary",
    "answers_changed",
    "not_loaded",
)
"""Why a version is not published, see `publish.gate.HeldBack`."""


@dataclass(frozen=True, slots=True)
class SliceScore:
    """Loss of a regime on one slice of the canaries."""

    __pydantic_config__ = FIELD_DOCS

    slice: str
    """Its name."""
    records: int
    """Records in the slice."""
    loss: float
    """Mean loss of the regime over those records, nats per token."""
    backbone_loss: float
    """Mean loss of the untouched backbone."""
    p_value: float | None = None
    """p-value of the gate's test that the regime is no worse; null outside of the gate."""
    worst: tuple[str, ...] = ()
    """Records whose loss rose most, as FILE:OFFSET, at most 5, the worst first."""


@dataclass(frozen=True, slots=True)
class RegimePublication:
    """Published version of a regime, and the gate's result for its newest version."""

    __pydantic_config__ = FIELD_DOCS

    number: int
    """Number of the regime."""
    version: str | None
    """Name of the published version; null if there is none, and then the untouched backbone answers."""
    held_back: str | None = None
    """Why the newest version is not published: too_few_records, worse_than_backbone, worse_than_published,
    worse_on_canary, answers_changed or not_loaded; null if it is."""
    step: int | None = None
    """Optimizer updates in the newest version that was tested; the values below are of it."""
    records: int | None = None
    """Hold-out records of the comparison that decided."""
    loss: float | None = None
    """Mean loss over those records, nats per token."""
    published_loss: float | None = None
    """Loss of the published version on the same records; null if the regime had none."""
    backbone_loss: float | None = None
    """Loss of the untouched backbone on all hold-out records."""
    p_value: float | None = None
    """Smallest p-value of the tests that it is no worse; it is held back at or below publish.level."""
    canaries: tuple[SliceScore, ...] = ()
    """The newest version on the canaries, by slice; empty if it was held back before, and without canaries."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One model server."""

    __pydantic_config__ = FIELD_DOCS

    url: str
    """Its base URL."""
    is_up: bool
    """Whether it answered the last poll."""
    loaded: int
    """Published versions that it has loaded."""
    wanted: int
    """Versions that it should have loaded."""
    fault: str | None = None
    """Why it is unreachable, or its refusal; null when nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersions:
    """The newest publication, as /v1/publication returns it too."""

    __pydantic_config__ = FIELD_DOCS

    sequence: int | None = None
    """Number of the newest publication; null before the first."""
    snapshot: str | None = None
    """Snapshot that its routing state is from."""
    regimes: tuple[RegimePublication, ...] = ()
    """By number."""
    replicas: tuple[ReplicaStatus, ...] = ()
    """In the order of publish.vllm.replicas."""
    fault: str | None = None
    """Why the newest snapshot could not be published yet; null when nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationStatus(PublishedVersions):
    """The newest publication, and work in progress."""

    written_at: float | None = None
    """Unix time."""
    num_published: int = 0
    """Versions published by this process."""
    num_held_back: tuple[tuple[str, int], ...] = ()
    """Versions held back by this process, by reason."""


@dataclass(frozen=True, slots=True)
class TrackerStatus:
    """One tracker, as seen by this process."""

    __pydantic_config__ = FIELD_DOCS

    name: str
    """tensorboard or mlflow."""
    step: int | None = None
    """Newest step that was written; null before the first."""
    pending: int = 0
    """Samples that wait to be written."""
    dropped: int = 0
    """Samples that were left out because too many waited."""
    failures: int = 0
    """Failed attempts to write."""
    fault: str | None = None
    """Why the last attempt failed; null if it did not."""


class Phase(StrEnum):
    """Phase of the training loop."""

    STARTING = "starting"
    RESTORING = "restoring"
    RUNNING = "running"
    IDLE = "idle"
    PAUSED = "paused"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """Training progress of one partition."""

    __pydantic_config__ = FIELD_DOCS

    topic: str
    """Topic, or the file of a JSONL source."""
    partition: int
    """Number of the partition."""
    position: int
    """Offset of the next record to train on."""
    lag: int | None = None
    """Records between the position and the end of the log; null when unknown."""


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """The newest durable snapshot."""

    name: str
    step: int
    written_at: float
    """Unix time, so that it stays valid across a restart."""
    write_seconds: float | None = None
    """Duration of writing it; None if another process did."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """One scoring of a regime's hold-out records."""

    __pydantic_config__ = FIELD_DOCS

    step: int
    """Optimizer updates made before the scoring."""
    loss: float
    """Nats per learned token."""
    accuracy: float
    """Teacher-forced: share of learned tokens that were the most probable ones, 0 to 1."""


@dataclass(frozen=True, slots=True)
class RegimeStatus:
    """A remembered regime. Records are counted from 1 over all that were trained on or held out."""

    __pydantic_config__ = FIELD_DOCS

    number: int
    """Unique; never reused."""
    slot: int
    """Where its state is kept; reused after the regime is forgotten."""
    name: str = ""
    """Label for people; empty without one."""
    frozen: bool = False
    """Whether its records are measured and not trained on."""
    current: bool = False
    """Whether the stream is in this regime."""
    visits: int = 0
    """Number of segments of the stream in this regime."""
    records: int = 0
    """Records trained on, held out, or measured while it was frozen."""
    first_record: int | None = None
    """Its first record."""
    last_record: int | None = None
    """Its last record so far."""
    prequential_loss: float | None = None
    """Loss of its newest records before each was trained on, or while it was frozen, nats per learned token, smoothed
    over up to 128 of them; null before one was measured since the regime began or its answers changed."""
    holdout_records: int = 0
    """Held-out records in its sample."""
    rehearsal_records: int = 0
    """Trained records in its sample for rehearsal."""
    history: tuple[Scoring, ...] = ()
    """Scorings of the sample, oldest first; a long history is thinned out."""
    best_accuracy: float | None = None
    """Best accuracy since its last segment ended; null before that, and until it is scored for it."""
    end_accuracy: float | None = None
    """Accuracy at the end of its last segment; null before that, and until it is scored for it."""
    canaries: tuple[SliceScore, ...] = ()
    """Its newest scores on the canaries, by slice; empty before the first, and without canaries."""
    canaries_step: int | None = None
    """Optimizer updates in the snapshot whose weights were scored."""

    @property
    def now(self) -> Scoring | None:
        return self.history[-1] if self.history else None


SHIFT_KINDS = ("inputs", "answers")


@dataclass(frozen=True, slots=True)
class ShiftStatus:
    """A detected shift. The first regime is listed too, with `previous` null; it is not counted as a shift."""

    __pydantic_config__ = FIELD_DOCS

    kind: str
    """inputs: the stream entered another regime; answers: the answers to the same inputs changed."""
    number: int
    """Position among the entries of its kind, from 1."""
    regime: int
    """The regime that was entered, or whose answers changed."""
    known: bool
    """Whether the regime had occurred before."""
    previous: int | None
    """The regime before the shift."""
    declared_at: int
    """Record at which the shift was declared."""
    onset: int
    """Estimated first record after the shift."""
    statistic: float
    """Test statistic."""
    threshold: float
    """Threshold of the test."""
    parent: int | None
    """Regime that was split in two; it continues beside the new one. Null if the stream moved on."""
    dropped: int | None
    """Regime that was forgotten, or merged into another one, to make room."""
    step: int
    """Optimizer updates made before the shift."""
    probe_tokens: int
    """Tokens that the probe read; 0 when nothing was probed."""
    probe_seconds: float
    """Duration of the probe."""
    mean_similarity: float | None
    """Mean CKA of the transient expert with the stable experts; null when they were not compared."""
    probe_losses: tuple[float, float] | None = None
    """Mean loss of the records of the transient expert's last steps, without it and with it, nats per token; null where
    none was trained."""
    probe_failed: bool = False
    """Whether the second is not lower: then nothing of the probe is used."""
    similarity_range: tuple[float, float] | None = None
    """Lowest and highest mean CKA of a head, of all layers; null when they were not compared. The routing bias of an
    expert is its own CKA times `adapter.bias_strength`."""
    mean_importance: float | None = None
    """Mean importance of the transient expert's weights; null unless importance is measured by it."""
    started_from: int | None = None
    """Regime whose adapter was copied as the new one's start; null when it started from nothing."""
    refused_return: int | None = None
    """Known regime that the inputs look like; by its losses the new one is another. Null when there is none."""
    tokens_came: tuple[str, ...] = ()
    """At most 10 words with tokens that inputs of the new regime have more often than those of the previous one, the
    clearest first. Empty for shifts of the answers."""
    tokens_went: tuple[str, ...] = ()
    """The same with both regimes exchanged."""
    typical_records: tuple[str, ...] = ()
    """At most 3 records nearest to the mean of the regime's first ones, as TOPIC:PARTITION:OFFSET."""
    typical_records_before: tuple[str, ...] = ()
    """At most 3 hold-out records of the previous regime, or of the one that was split, nearest to their mean."""


@dataclass(frozen=True, slots=True)
class FallbackStatus:
    """How requests that no regime explains are answered."""

    __pydantic_config__ = FIELD_DOCS

    setting: str
    """serve.unknown: auto, mean, nearest or backbone."""
    answered_by: str
    """mean: the adapters of all regimes, averaged; nearest: the likeliest regime; backbone: the untouched
    backbone."""
    mean_loss: float | None
    """Loss of the first records of new regimes, before anything is learned from them, under the mean of the adapters,
    nats per token; null before it was measured, and where regimes have no adapters of their own."""
    nearest_loss: float | None
    """Loss of the same records under the likeliest known regime."""
    backbone_loss: float | None
    """Loss of the same records under the untouched backbone."""
    regimes: int
    """Number of those new regimes."""

    @property
    def losses(self) -> dict[str, float | None]:
        return {"mean": self.mean_loss, "nearest": self.nearest_loss, "backbone": self.backbone_loss}


AnsweredBy = Literal["regime", "adapter", "mean", "backbone"]
"""What computes the answer: the likeliest regime's experts; the adapter, where routing does not depend on regimes; the
mean of all regimes' adapters; or the untouched backbone."""
ANSWERED_BY: tuple[AnsweredBy, ...] = get_args(AnsweredBy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgettingMeans:
    """Each regime's accuracy on its hold-out records now, compared with earlier."""

    __pydantic_config__ = FIELD_DOCS

    average_forgetting: float | None = None
    """Mean over past regimes of best accuracy since the segment ended minus accuracy now; null before a scoring."""
    backward_transfer: float | None = None
    """Mean over past regimes of accuracy now minus accuracy at the end of the segment; null before a scoring."""


@dataclass(frozen=True, slots=True)
class RegimeExperts:
    """How the tokens of a regime are routed.

    A row is a head, a column one of its experts, the busiest first. Numbers are means over the adapted linears, each of
    which has experts of its own.
    """

    __pydantic_config__ = FIELD_DOCS

    regime: int
    """Number of the regime."""
    shares: tuple[tuple[float, ...], ...]
    """Share of the head's tokens that the expert was given in training since this process began, 0 to 1. Where experts
    are shared, batches of several regimes are not counted."""
    bias: tuple[tuple[float, ...], ...] | None
    """The expert's routing bias for the regime, adapter.bias_strength times its CKA; null without biases."""


@dataclass(frozen=True, slots=True)
class AdaptationStatus(ForgettingMeans):
    """Regimes, shifts, and forgetting as measured on the hold-out records."""

    regimes: tuple[RegimeStatus, ...] = ()
    """Remembered regimes, by number."""
    shifts: tuple[ShiftStatus, ...] = ()
    """Oldest first; only the newest of a long history."""
    num_shifts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Shifts ever detected, by kind; the first regime is not counted."""
    probe_seconds: float = 0.0
    """Time spent on probes by this process."""
    holdout_seconds: float = 0.0
    """Training time spent on scoring hold-out records and canaries by this process; idle time is not counted."""
    adapters_in_memory: int = 0
    """Adapters that are not at rest in files; 1 where regimes share one."""
    adapter_reads: int = 0
    """Adapters read back from their files by this process."""
    fallback: FallbackStatus = FallbackStatus("auto", "backbone", None, None, None, 0)
    routes_by_regime: bool = True
    """Whether a request can name a regime."""
    experts: tuple[RegimeExperts, ...] = ()
    """By regime number, of those that this process trained; empty without a router."""
    effective_regimes: float | None = None
    """How many regimes an expert that they share serves, on average; see `ExpertsView`."""

    @property
    def current(self) -> RegimeStatus | None:
        """The regime that the stream is in; None before the first."""
        return next((regime for regime in self.regimes if regime.current), None)


@dataclass(frozen=True, slots=True)
class Progress:
    """The part of the status that /v1/status returns as it is: a field added here is in both."""

    __pydantic_config__ = FIELD_DOCS

    phase: Phase
    """Phase of the training loop."""
    step: int = 0
    """Optimizer updates made."""
    records_trained: int = 0
    """Records trained on."""
    records_held_out: int = 0
    """Records kept out of training: to measure forgetting, or because their regime is frozen."""
    dead_letters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Unusable records, by reason."""
    ignored: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Records that there is nothing to learn from by their nature, such as deletions, by reason."""
    truncated_records: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Records cut to stream.max_tokens, by form."""
    truncated_tokens: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Tokens that they lost, by form."""
    update_refusals: int = 0
    """Updates skipped because the loss or a gradient was not finite."""
    tokens_trained: int = 0
    """Tokens of records trained on."""
    tokens_per_s: float = 0.0
    """Recent training throughput."""
    partitions: tuple[PartitionStatus, ...] = ()
    """Training progress per partition."""
    step_seconds: float | None = None
    """Duration of the last step; null before the first of this process."""
    backbone: str = ""
    """The frozen model."""
    dtype: str = ""
    """Data type of the backbone."""
    device: str = ""
    """Device of the model."""
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Versions of streamlearn, Python, torch and others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Progress):
    """The daemon at one moment.

    Counts are over the learner's lifetime: a restart continues them, and a crash or a rollback resets them to the
    snapshot's values. `Counters` has those of this process.
    """

    ready: bool = False
    """Whether the daemon accepts jobs."""
    reason: str = ""
    """Why it is not ready, for people; empty when ready."""
    degraded: str = ""
    """Failed writes during which learning continues, for people; empty when nothing is wrong."""
    ended_threads: tuple[str, ...] = ()
    """Threads of the process that an error ended, for people."""
    started_at: float = 0.0
    """Start of the process, Unix time."""
    last_step_at: float | None = None
    """When this process made its last update, by the monotonic clock; None before the first."""
    loss: float | None = None
    """Prequential loss of the last batch, nats per token."""
    loss_smoothed: float | None = None
    """Prequential loss smoothed over recent batches, nats per token."""
    learning_rate: float | None = None
    """Learning rate of the newest update, after the warm-up and before the decay by each expert's own updates."""
    adaptation: AdaptationStatus = AdaptationStatus()
    publication: PublicationStatus | None = None
    """None unless regimes are published."""
    history: HistoryStatus = field(default_factory=HistoryStatus)
    """The past of the run, at most one batch behind."""
    trackers: tuple[TrackerStatus, ...] = ()
    """Experiment trackers."""
    snapshot: SnapshotStatus | None = None
    records_since_snapshot: int = 0
    """Records done since the newest snapshot."""
    requests: Mapping[tuple[bool, AnsweredBy], int] = field(default_factory=lambda: MappingProxyType({}))
    """Prompts and examples of finished requests, by whether a regime explained them and by what answered."""
    preset: str = ""
    """Adapter preset."""

    @property
    def faults(self) -> str:
        """What is wrong though learning continues, for people; empty when nothing is."""
        return "; ".join(filter(None, (self.degraded, *self.ended_threads)))

    @property
    def records_dead_lettered(self) -> int:
        """Unusable records, all reasons together."""
        return sum(self.dead_letters.values())

    @property
    def records_ignored(self) -> int:
        """Ignored records, all reasons together."""
        return sum(self.ignored.values())


@dataclass(frozen=True, slots=True)
class Route:
    """The likeliest regime of an input, and what answers it."""

    __pydantic_config__ = FIELD_DOCS

    regime: int | None
    """Number of the likeliest regime, or of the requested one; null before the first record."""
    score: float
    """Share of the regimes' own records that are explained no better, 0 to 1 (a p-value)."""
    known: bool
    """Whether the regime explains the input: the score is at least serve.max_known_rejected."""
    answered_by: AnsweredBy
    """regime: its experts; adapter: all experts, where routing does not depend on regimes; mean: the adapters of all
    regimes, averaged; backbone: no expert."""


Requested = int | Literal["routed", "backbone"]
"""What a request is to be answered by: the regime with this number, what routing finds, or the untouched backbone."""


class UnknownRegimeError(StreamlearnError):
    """No remembered regime has the requested number; the client asks for another."""
