"""The published status as clients see it: one model a reading endpoint, with the status's own rows in it."""

from datetime import UTC, datetime

from streamlearn.jobs.results import Body
from streamlearn.status.board import Board, Clock
from streamlearn.status.status import SHIFT_KINDS, AdaptationStatus, Phase, RegimeStatus, ShiftStatus, Status


class Liveness(Body):
    """The training loop turns."""

    alive: bool
    heartbeat_age_s: float
    """Since the loop's last report."""
    heartbeat_bound_s: float
    """How old the last report may get in this phase."""


class Readiness(Body):
    """Jobs are taken."""

    ready: bool
    phase: Phase
    step: int


class LossView(Body):
    """Prequential loss: each batch measured before its update, nats per token."""

    last: float | None
    smoothed: float | None


class PartitionView(Body):
    """How far one partition has been trained."""

    topic: str
    partition: int
    position: int
    """Offset of the next record to train on."""
    lag: int | None
    """Records behind the log's end, when known."""


class SnapshotView(Body):
    """The newest durable snapshot."""

    name: str
    step: int
    written_at: datetime
    age_s: float


class JobsView(Body):
    """The queue of requests that the loop serves: evals, generations, experts, snapshots."""

    waiting: int
    capacity: int


class ForgettingView(Body):
    """What the hold-out records say: each regime's accuracy now against what it was."""

    average_forgetting: float | None
    """Mean over past regimes of best accuracy since it was left, less accuracy now; null before one was scored."""
    backward_transfer: float | None
    """Mean over past regimes of accuracy now less accuracy when their stretch ended."""
    loss_by_regime: dict[str, float]
    """Nats per learned token of each regime's hold-out records, newest scoring, by the regime's number."""


class RegimesView(Body):
    """Regimes by number, and what was forgotten."""

    current: int | None
    """Number of the regime that the stream is in."""
    average_forgetting: float | None
    """Mean over past regimes of best accuracy since it was left, less accuracy now; null before one was scored."""
    backward_transfer: float | None
    """Mean over past regimes of accuracy now less accuracy when their stretch ended."""
    regimes: tuple[RegimeStatus, ...]


class ShiftsView(Body):
    """Shifts, oldest first; of very many the newest."""

    total: dict[str, int]
    """By kind, all that there ever were."""
    shifts: tuple[ShiftStatus, ...]


class StatusView(Body):
    """The daemon at one moment. Counts are over the learner's life, as its snapshots keep them."""

    phase: Phase
    ready: bool
    reason: str | None
    """Why not ready."""
    degraded: str | None
    """What cannot be written (snapshots, dead letters, the journal) although learning goes on."""
    started_at: datetime
    heartbeat_age_s: float
    """Since the loop's last report."""
    step: int
    """Updates that the learner holds."""
    records_trained: int
    records_held_out: int
    """Kept out of training to measure forgetting."""
    records_dead_lettered: int
    dead_letters: dict[str, int]
    """Records set aside, by reason."""
    update_refusals: int
    """Updates not made because loss or gradient was not finite."""
    tokens_trained: int
    tokens_per_s: float
    prequential_loss_nats: LossView
    current_regime: int | None
    """Number of the regime that the stream is in; /v1/regimes has all."""
    num_regimes: int
    """Remembered."""
    num_shifts: dict[str, int]
    """Declared so far, by kind; /v1/shifts has them."""
    forgetting: ForgettingView
    probe_seconds: float
    """Spent on probes, by this process."""
    holdout_seconds: float
    """Spent on scoring hold-out records, by this process."""
    partitions: tuple[PartitionView, ...]
    last_snapshot: SnapshotView | None
    step_seconds: float | None
    """Of the last step."""
    snapshot_write_seconds: float | None
    """Of the last snapshot."""
    jobs: JobsView
    backbone: str
    dtype: str
    device: str
    adapter_preset: str
    versions: dict[str, str]


def status_view(board: Board, jobs: JobsView, clock: Clock) -> StatusView:
    """The status as clients see it, ages as of now."""
    status = board.read()
    snapshot, adaptation = status.snapshot, status.adaptation
    why = board.why_not_ready()
    return StatusView(
        phase=status.phase,
        ready=why is None,
        reason=why,
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
        backbone=status.backbone,
        dtype=status.dtype,
        device=status.device,
        adapter_preset=status.preset,
        versions=dict(status.versions),
    )


def regimes_view(status: Status) -> RegimesView:
    """Regimes as clients see them."""
    adaptation = status.adaptation
    return RegimesView(
        current=adaptation.current and adaptation.current.number,
        average_forgetting=adaptation.average_forgetting,
        backward_transfer=adaptation.backward_transfer,
        regimes=adaptation.regimes,
    )


def shifts_view(status: Status) -> ShiftsView:
    """Shifts as clients see them."""
    return ShiftsView(total=_totals(status.adaptation), shifts=status.adaptation.shifts)


def _totals(adaptation: AdaptationStatus) -> dict[str, int]:
    return {kind: adaptation.num_shifts.get(kind, 0) for kind in SHIFT_KINDS}


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(round(seconds, 3), UTC)
