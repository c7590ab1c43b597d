"""What the loop says about itself: one immutable status, swapped whole on a board that any thread may read."""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from streamlearn.stream.record import TopicPartition

HEARTBEAT_BOUND_S = (
    60.0  # the longest turn of the loop: a step, a snapshot and the job budget, each a few seconds, x 10
)
STARTING_BOUND_S = 600.0  # loading a backbone from a cold disk is one turn: 16 GB at 30 MB/s

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of a timing's buckets, seconds."""


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
class Clock:
    """Both kinds of time, in seconds; tests pass their own."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Timing:
    """How long something took, since the process started, as a histogram over `BUCKETS_S`.

    >>> timing = Timing().observe(0.02).observe(0.3)
    >>> timing.count, timing.total_s, timing.last_s
    (2, 0.32, 0.3)
    """

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    """Observations per bucket, not cumulative; the last is everything longer."""
    total_s: float = 0.0
    last_s: float | None = None

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, seconds: float) -> "Timing":
        """This timing and one observation more."""
        at = bisect_left(BUCKETS_S, seconds)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return Timing(counts, self.total_s + seconds, seconds)


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
    step_seconds: Timing = Timing()
    snapshot_seconds: Timing = Timing()
    job_seconds: Timing = Timing()
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


class Board:
    """Where the loop publishes and everyone else reads. One writer, any number of readers, no locks: a swap is atomic.

    A publication is a heartbeat. A loop that waits or works without anything new to say calls `beat`.
    """

    def __init__(
        self,
        status: Status,
        clock: Clock,
        *,
        bound_s: float = HEARTBEAT_BOUND_S,
        starting_bound_s: float = STARTING_BOUND_S,
        heed: Callable[[Status], None] = lambda _: None,
    ) -> None:
        """`heed` hears every publication and heartbeat, in the thread of the loop."""
        self._clock = clock
        self._heed = heed
        self._bound_s = bound_s
        self._starting_bound_s = starting_bound_s
        self.publish(status)

    def publish(self, status: Status) -> None:
        """Replace the status; what it holds must not change afterwards."""
        self._beat = self._clock.monotonic()  # first: the new phase may have the tighter bound
        self._status = replace(
            status,
            dead_letters=MappingProxyType(dict(status.dead_letters)),
            versions=MappingProxyType(dict(status.versions)),
        )
        self._heed(self._status)

    def read(self) -> Status:
        """The newest status."""
        return self._status

    def beat(self) -> None:
        """Say that the loop turns."""
        self._beat = self._clock.monotonic()
        self._heed(self._status)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the loop last said that it turns."""
        return self._clock.monotonic() - self._beat

    @property
    def heartbeat_bound_s(self) -> float:
        """Seconds that the loop may be silent in this phase."""
        starting = self._status.phase in (Phase.STARTING, Phase.RESTORING)
        return self._starting_bound_s if starting else self._bound_s

    @property
    def alive(self) -> bool:
        """Whether the loop turns and has not given up."""
        return self._status.phase is not Phase.FAILED and self.heartbeat_age_s <= self.heartbeat_bound_s

    def why_not_alive(self) -> str | None:
        """For people; None while alive."""
        if self._status.phase is Phase.FAILED:
            return f"the daemon failed: {self._status.reason or 'the log says why'}"
        if not self.alive:
            return (
                f"the training loop must report every {self.heartbeat_bound_s:g} s, "
                f"its last report is {self.heartbeat_age_s:.1f} s old"
            )
        return None

    def why_not_ready(self) -> str | None:
        """For people; None while jobs are taken."""
        status = self._status
        stalled = self.why_not_alive()
        if stalled is not None:
            return stalled
        return None if status.ready else status.reason or f"the daemon is {status.phase}"
