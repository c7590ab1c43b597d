"""What the loop publishes about itself: one immutable status."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from streamlearn.status.field_docs import FIELD_DOCS
from streamlearn.status.history_status import HistoryStatus
from streamlearn.status.process_counts import ProcessCounts
from streamlearn.status.publication_status import PublicationStatus
from streamlearn.status.timing import Timing
from streamlearn.status.tracker_status import TrackerStatus
from streamlearn.stream.record import TopicPartition


class Phase(StrEnum):
    """What the training loop is doing."""

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

    origin: TopicPartition
    position: int
    """Offset of the next record to train on."""
    lag: int | None = None
    """Records between the position and the end of the log; None when unknown."""


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """The newest durable snapshot."""

    name: str
    step: int
    written_at: float
    """Unix time, so that it stays valid across a restart."""


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
    history: tuple[Scoring, ...] = ()
    """Scorings of the sample, oldest first; a long history is thinned out."""
    best_accuracy: float | None = None
    """Best accuracy since its last segment ended; null before that, and until it is scored for it."""
    end_accuracy: float | None = None
    """Accuracy at the end of its last segment; null before that, and until it is scored for it."""

    @property
    def now(self) -> Scoring | None:
        """The newest scoring."""
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
    """Regime that was found to be two and was split; it goes on beside the new one. Null if the stream moved on."""
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
    started_from: int | None = None
    """Regime whose adapter was copied as the new one's start; null when it started from nothing."""
    refused_return: int | None = None
    """Known regime that the inputs look like; by its losses the new one is another. Null when there is none."""


@dataclass(frozen=True, slots=True)
class FallbackStatus:
    """What answers requests that no regime explains."""

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
        """The mean losses by what answers."""
        return {"mean": self.mean_loss, "nearest": self.nearest_loss, "backbone": self.backbone_loss}


@dataclass(frozen=True, slots=True)
class RequestCount:
    """Inputs of requests that were routed alike."""

    known: bool
    """Whether a regime explained them."""
    answered_by: str
    """regime, adapter, mean or backbone."""
    number: int


ANSWERED_BY = ("regime", "adapter", "mean", "backbone")


@dataclass(frozen=True, slots=True)
class AdaptationStatus:
    """Regimes, shifts, and forgetting as measured on the hold-out records."""

    regimes: tuple[RegimeStatus, ...] = ()
    """Remembered regimes, by number."""
    shifts: tuple[ShiftStatus, ...] = ()
    """Oldest first; only the newest of a long history."""
    num_shifts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Shifts ever detected, by kind; the first regime is not counted."""
    average_forgetting: float | None = None
    """Mean over past regimes of best accuracy since the segment ended minus accuracy now; None before a scoring."""
    backward_transfer: float | None = None
    """Mean over past regimes of accuracy now minus accuracy at the end of the segment."""
    probe_seconds: float = 0.0
    """Time spent on probes by this process."""
    holdout_seconds: float = 0.0
    """Training time spent on scoring hold-out records by this process; idle time is not counted."""
    adapters_in_memory: int = 0
    """Adapters that are not at rest in files; 1 where regimes share one."""
    adapter_reads: int = 0
    """Adapters read back from their files by this process."""
    fallback: FallbackStatus = FallbackStatus("auto", "backbone", None, None, None, 0)
    routes_by_regime: bool = True
    """Whether a regime can be asked to answer."""

    @property
    def current(self) -> RegimeStatus | None:
        """The regime that the stream is in; None before the first."""
        return next((regime for regime in self.regimes if regime.current), None)


@dataclass(frozen=True, slots=True)
class Status:
    """The daemon at one moment.

    Counts are over the learner's lifetime: a restart continues them, and a crash or a rollback resets them to the
    snapshot's values. Timings and `counts` are of this process.
    """

    phase: Phase
    ready: bool = False
    """Whether the daemon accepts jobs."""
    reason: str = ""
    """Why it is not ready, for people; empty when ready."""
    degraded: str = ""
    """What cannot be written although learning continues, for people; empty when nothing is wrong."""
    started_at: float = 0.0
    """Start of the process, Unix time."""
    step: int = 0
    """Optimizer updates made."""
    last_step_at: float | None = None
    """When this process made its last update, by the monotonic clock; None before the first."""
    records_trained: int = 0
    records_held_out: int = 0
    """Records kept out of training: to measure forgetting, or because their regime is frozen."""
    tokens_trained: int = 0
    tokens_per_s: float = 0.0
    """Recent training throughput."""
    loss: float | None = None
    """Prequential loss of the last batch, nats per token."""
    loss_smoothed: float | None = None
    """Prequential loss smoothed over recent batches, nats per token."""
    learning_rate: float | None = None
    """Learning rate of the newest update, after the warm-up and before the decay by each expert's own updates."""
    dead_letters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Unusable records, by reason."""
    update_refusals: int = 0
    """Updates skipped because the loss or a gradient was not finite."""
    counts: ProcessCounts = field(default_factory=ProcessCounts)
    """What this process did; for counters, which must not fall."""
    adaptation: AdaptationStatus = AdaptationStatus()
    publication: PublicationStatus | None = None
    """None unless regimes are published."""
    history: HistoryStatus = field(default_factory=HistoryStatus)
    """The past of the run, at most one batch behind."""
    trackers: tuple[TrackerStatus, ...] = ()
    """Experiment trackers."""
    partitions: tuple[PartitionStatus, ...] = ()
    snapshot: SnapshotStatus | None = None
    records_since_snapshot: int = 0
    """Records done since the newest snapshot."""
    step_seconds: Timing = field(default_factory=Timing)
    snapshot_seconds: Timing = field(default_factory=Timing)
    job_seconds: Timing = field(default_factory=Timing)
    """Pauses of training between two steps, spent on jobs."""
    requests: tuple[RequestCount, ...] = ()
    """Prompts and examples of finished requests, by how they were routed."""
    backbone: str = ""
    dtype: str = ""
    device: str = ""
    preset: str = ""
    """Adapter preset."""
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Versions of streamlearn, Python, torch and others."""

    @property
    def records_dead_lettered(self) -> int:
        """Unusable records, all reasons together."""
        return sum(self.dead_letters.values())
