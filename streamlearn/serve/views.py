"""The published status as HTTP returns it: one model per monitoring endpoint."""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

from streamlearn.jobs.results import ApiModel
from streamlearn.status.board import Board, Clock
from streamlearn.status.publication_status import PublicationStatus, RegimePublication, ReplicaStatus
from streamlearn.status.status import (
    ANSWERED_BY,
    SHIFT_KINDS,
    AdaptationStatus,
    FallbackStatus,
    Phase,
    RegimeStatus,
    RequestCount,
    ShiftStatus,
    Status,
)


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
    """What the training loop is doing."""
    step: int
    """Optimizer updates made."""


class LossView(ApiModel):
    """Prequential loss: each batch is scored before its update. Nats per token."""

    last: float | None
    """Loss of the last batch."""
    smoothed: float | None
    """Smoothed over recent batches."""


class PartitionView(ApiModel):
    """Training progress of one partition."""

    topic: str
    """Topic, or the file of a JSONL source."""
    partition: int
    """Number of the partition."""
    position: int
    """Offset of the next record to train on."""
    lag: int | None
    """Records between the position and the end of the log; null when unknown."""


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


class ForgettingView(ApiModel):
    """Forgetting on the hold-out records: each regime's accuracy now compared with earlier."""

    average_forgetting: float | None
    """Mean over past regimes of best accuracy since the segment ended minus accuracy now; null before a scoring."""
    backward_transfer: float | None
    """Mean over past regimes of accuracy now minus accuracy at the end of the segment; null before a scoring."""
    loss_by_regime: dict[str, float]
    """Hold-out loss of each regime at its newest scoring, nats per learned token, by regime number."""


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
    """The part of them that no regime explained; regime is then the nearest, or the one that was asked for."""


class RegimesView(ApiModel):
    """Remembered regimes by number, and forgetting."""

    current: int | None
    """Number of the regime that the stream is in."""
    average_forgetting: float | None
    """Mean over past regimes of best accuracy since the segment ended minus accuracy now; null before a scoring."""
    backward_transfer: float | None
    """Mean over past regimes of accuracy now minus accuracy at the end of the segment; null before a scoring."""
    regimes: tuple[RegimeStatus, ...]
    """Remembered regimes."""


class ShiftsView(ApiModel):
    """Detected shifts, oldest first; only the newest of a long history."""

    total: dict[str, int]
    """Shifts ever detected, by kind; the first regime is not counted."""
    shifts: tuple[ShiftStatus, ...]
    """The newest shifts. The first entry of a run is its first regime, with `previous` null."""


class PublicationView(ApiModel):
    """What is published of each regime, what was held back and why, and the replicas."""

    enabled: bool
    """Whether the configuration has a section `publish`; if not, the rest is empty."""
    sequence: int | None
    """Number of the newest publication; null before the first."""
    snapshot: str | None
    """Snapshot that its routing state is from."""
    written_at: datetime | None
    """When it was written."""
    regimes: tuple[RegimePublication, ...]
    """By number."""
    replicas: tuple[ReplicaStatus, ...]
    """In the order of publish.vllm.replicas."""
    published: int
    """Versions published by this process."""
    held_back: dict[str, int]
    """Versions held back by this process, by reason."""
    fault: str | None
    """Why the newest snapshot could not be published yet; null when nothing is wrong."""


class StatusView(ApiModel):
    """The daemon at one moment. Counts are over the learner's lifetime, across restarts."""

    phase: Phase
    """What the training loop is doing."""
    ready: bool
    """Whether the daemon accepts jobs."""
    reason: str | None
    """Why the daemon is not ready; null when it is."""
    degraded: str | None
    """What cannot be written (snapshots, dead letters, journal) although learning continues; null when nothing."""
    started_at: datetime
    """Start of the process."""
    heartbeat_age_s: float
    """Time since the training loop last reported."""
    step: int
    """Optimizer updates made."""
    records_trained: int
    """Records trained on."""
    records_held_out: int
    """Records kept out of training to measure forgetting."""
    records_dead_lettered: int
    """Unusable records, all reasons together."""
    dead_letters: dict[str, int]
    """Unusable records, by reason."""
    update_refusals: int
    """Updates skipped because the loss or a gradient was not finite."""
    tokens_trained: int
    """Tokens of records trained on."""
    tokens_per_s: float
    """Recent training throughput."""
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
    """Training time spent on scoring hold-out records by this process; idle time is not counted."""
    partitions: tuple[PartitionView, ...]
    """Training progress per partition."""
    last_snapshot: SnapshotView | None
    """The newest durable snapshot; null before the first."""
    step_seconds: float | None
    """Duration of the last step."""
    snapshot_write_seconds: float | None
    """Duration of writing the last snapshot."""
    jobs: JobsView
    """The job queue."""
    requests: RequestsView
    """What was asked, and what answered it."""
    unknown_requests: FallbackStatus
    """What answers requests that no regime explains."""
    backbone: str
    """The frozen model."""
    dtype: str
    """Data type of the backbone."""
    device: str
    """Device of the model."""
    adapter_preset: str
    """Adapter preset."""
    versions: dict[str, str]
    """Versions of streamlearn, Python, torch and others."""


def status_view(board: Board, jobs: JobsView, clock: Clock) -> StatusView:
    """Body of /v1/status, with ages as of now."""
    status = board.read()
    snapshot, adaptation = status.snapshot, status.adaptation
    reason = board.why_not_ready()
    return StatusView(
        phase=status.phase,
        ready=reason is None,
        reason=reason,
        degraded=status.degraded or None,
        started_at=_utc(status.started_at),
        heartbeat_age_s=round(board.heartbeat_age_s, 3),
        step=status.step,
        records_trained=status.records_trained,
        records_held_out=status.records_held_out,
        records_dead_lettered=status.records_dead_lettered,
        dead_letters=dict(status.dead_letters),
        update_refusals=status.update_refusals,
        tokens_trained=status.tokens_trained,
        tokens_per_s=round(status.tokens_per_s, 1),
        prequential_loss_nats=LossView(last=status.loss, smoothed=status.loss_smoothed),
        current_regime=adaptation.current and adaptation.current.number,
        num_regimes=len(adaptation.regimes),
        num_shifts=_totals(adaptation),
        forgetting=ForgettingView(
            average_forgetting=adaptation.average_forgetting,
            backward_transfer=adaptation.backward_transfer,
            loss_by_regime={str(each.number): each.now.loss for each in adaptation.regimes if each.now is not None},
        ),
        probe_seconds=round(adaptation.probe_seconds, 3),
        holdout_seconds=round(adaptation.holdout_seconds, 3),
        partitions=tuple(
            PartitionView(topic=row.origin.topic, partition=row.origin.partition, position=row.position, lag=row.lag)
            for row in status.partitions
        ),
        last_snapshot=snapshot
        and SnapshotView(
            name=snapshot.name,
            step=snapshot.step,
            written_at=_utc(snapshot.written_at),
            age_s=round(max(0.0, clock.wall() - snapshot.written_at), 3),
        ),
        step_seconds=status.step_seconds.last_s,
        snapshot_write_seconds=status.snapshot_seconds.last_s,
        jobs=jobs,
        requests=RequestsView(
            known=sum(each.number for each in status.requests if each.known),
            unknown=sum(each.number for each in status.requests if not each.known),
            answered_by=_by_answer(status.requests),
            unknown_answered_by=_by_answer(each for each in status.requests if not each.known),
        ),
        unknown_requests=adaptation.fallback,
        backbone=status.backbone,
        dtype=status.dtype,
        device=status.device,
        adapter_preset=status.preset,
        versions=dict(status.versions),
    )


def regimes_view(status: Status) -> RegimesView:
    """Body of /v1/regimes."""
    adaptation = status.adaptation
    return RegimesView(
        current=adaptation.current and adaptation.current.number,
        average_forgetting=adaptation.average_forgetting,
        backward_transfer=adaptation.backward_transfer,
        regimes=adaptation.regimes,
    )


def shifts_view(status: Status) -> ShiftsView:
    """Body of /v1/shifts."""
    return ShiftsView(total=_totals(status.adaptation), shifts=status.adaptation.shifts)


def publication_view(status: Status) -> PublicationView:
    """Body of /v1/publication."""
    found = status.publication or PublicationStatus()
    return PublicationView(
        enabled=status.publication is not None,
        sequence=found.sequence,
        snapshot=found.snapshot,
        written_at=None if found.written_at is None else _utc(found.written_at),
        regimes=found.regimes,
        replicas=found.replicas,
        published=found.num_published,
        held_back=dict(found.num_held_back),
        fault=found.fault,
    )


def _by_answer(requests: Iterable[RequestCount]) -> dict[str, int]:
    counts = Counter(dict.fromkeys(ANSWERED_BY, 0))
    for each in requests:
        counts[each.answered_by] += each.number
    return dict(counts)


def _totals(adaptation: AdaptationStatus) -> dict[str, int]:
    return {kind: adaptation.num_shifts.get(kind, 0) for kind in SHIFT_KINDS}


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(round(seconds, 3), UTC)
