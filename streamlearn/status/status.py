"""What the loop publishes about itself: one immutable status."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from streamlearn.status.timing import Timing
from streamlearn.stream.record import TopicPartition

DESCRIBED = {"use_attribute_docstrings": True}
"""For rows that are served as they are: the OpenAPI document says what each field means."""


class Phase(StrEnum):
    """What the loop is doing."""

    STARTING = "starting"
    RESTORING = "restoring"
    RUNNING = "running"
    IDLE = "idle"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """How far one partition has been trained."""

    origin: TopicPartition
    position: int
    """Offset of the next record to train on."""
    lag: int | None = None
    """Records behind the log's end, when the source knows."""


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """The newest durable snapshot."""

    name: str
    step: int
    written_at: float
    """Wall time, seconds since 1970, so that it holds across a restart."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """One look at a regime's hold-out records."""

    __pydantic_config__ = DESCRIBED

    step: int
    """Steps that the learner had made."""
    loss: float
    """Nats per learned token."""
    accuracy: float
    """Teacher-forced: the share of learned tokens that were the most probable ones."""


@dataclass(frozen=True, slots=True)
class RegimeStatus:
    """A regime that is remembered. Records count from 1 over all that were trained on or kept out."""

    __pydantic_config__ = DESCRIBED

    number: int
    """Never used again."""
    slot: int
    """Where its state is kept; used again when it is forgotten."""
    current: bool = False
    """Whether the stream is in it."""
    visits: int = 0
    """Stretches that it had."""
    records: int = 0
    """Trained on or kept out."""
    first_record: int | None = None
    last_record: int | None = None
    holdout_records: int = 0
    """In its sample of those kept out."""
    history: tuple[Scoring, ...] = ()
    """Of the sample, oldest first; a long one is thinned out."""
    best_accuracy: float | None = None
    """Since its last stretch ended; None before."""
    end_accuracy: float | None = None
    """When its last stretch ended."""

    @property
    def now(self) -> Scoring | None:
        """The newest scoring."""
        return self.history[-1] if self.history else None


SHIFT_KINDS = ("inputs", "answers")


@dataclass(frozen=True, slots=True)
class ShiftStatus:
    """A shift that was declared and acted on."""

    __pydantic_config__ = DESCRIBED

    kind: str
    """inputs: another regime was entered; answers: the same inputs are answered otherwise now."""
    number: int
    """Counts the shifts of its kind, from 1."""
    regime: int
    """Entered, or the one whose answers changed."""
    known: bool
    """Whether it had been met before."""
    previous: int | None
    """The regime that was left."""
    declared_at: int
    """Record at which it was declared."""
    onset: int
    """First record that is believed to belong to it."""
    statistic: float
    threshold: float
    dropped: int | None
    """Regime that was forgotten, or merged into another, to make room."""
    step: int
    """Steps before it."""
    probe_tokens: int
    """Read by its transient expert; 0 when nothing was probed."""
    probe_seconds: float
    mean_similarity: float | None
    """CKA of the transient expert with every stable one, mean; None when nothing was probed."""


@dataclass(frozen=True, slots=True)
class AdaptationStatus:
    """Regimes, shifts, and what the hold-out records say about forgetting."""

    regimes: tuple[RegimeStatus, ...] = ()
    """Those that are remembered, by number."""
    shifts: tuple[ShiftStatus, ...] = ()
    """Oldest first; of very many the newest."""
    num_shifts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """By kind, all that there ever were."""
    average_forgetting: float | None = None
    """Mean over past regimes of best accuracy since it was left, less accuracy now; None before one was scored."""
    backward_transfer: float | None = None
    """Mean over past regimes of accuracy now less accuracy when the stretch ended."""
    probe_seconds: float = 0.0
    """Spent on probes, of this process."""
    holdout_seconds: float = 0.0
    """Spent on scoring hold-out records, of this process."""

    @property
    def current(self) -> RegimeStatus | None:
        """The regime that the stream is in; None before the first."""
        return next((regime for regime in self.regimes if regime.current), None)


@dataclass(frozen=True, slots=True)
class Status:
    """One moment of the daemon.

    Counts are over the learner's life: they go on after a restart, and a crash or a rollback takes them back to what
    the snapshot holds. Timings are of this process.
    """

    phase: Phase
    ready: bool = False
    """Whether jobs are taken."""
    reason: str = ""
    """Why not ready, for people; empty when ready."""
    degraded: str = ""
    """What cannot be written although learning goes on, for people; empty when all can."""
    started_at: float = 0.0
    """Wall time of the process start, seconds since 1970."""
    step: int = 0
    """Updates that the learner holds."""
    records_trained: int = 0
    records_held_out: int = 0
    """Kept out of training to measure forgetting."""
    tokens_trained: int = 0
    tokens_per_s: float = 0.0
    """Recent speed of training."""
    loss: float | None = None
    """Prequential loss of the last batch, nats per token."""
    loss_smoothed: float | None = None
    """The same, smoothed over recent batches."""
    dead_letters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Records set aside, by reason."""
    update_refusals: int = 0
    """Updates not made because loss or gradient was not finite."""
    adaptation: AdaptationStatus = AdaptationStatus()
    partitions: tuple[PartitionStatus, ...] = ()
    snapshot: SnapshotStatus | None = None
    step_seconds: Timing = field(default_factory=Timing)
    snapshot_seconds: Timing = field(default_factory=Timing)
    job_seconds: Timing = field(default_factory=Timing)
    """Pauses of training for jobs, between two steps."""
    backbone: str = ""
    dtype: str = ""
    device: str = ""
    preset: str = ""
    """The adapter's."""
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of streamlearn, python, torch, ..."""

    @property
    def records_dead_lettered(self) -> int:
        """Records set aside, all reasons together."""
        return sum(self.dead_letters.values())
