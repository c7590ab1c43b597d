"""The published status as Prometheus metrics. Values are read at scrape time; there is no global registry."""

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from streamlearn.errors import Reason
from streamlearn.jobs.queue import JobQueue
from streamlearn.serve.adaptation_metrics import adaptation_metrics, request_metrics
from streamlearn.serve.metric_families import counter, counters, gauge, gauges, histogram, info
from streamlearn.serve.publication_metrics import publication_metrics
from streamlearn.serve.tracker_metrics import tracker_metrics
from streamlearn.status.board import Board, Clock
from streamlearn.status.status import Phase, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusCollector(Collector):
    """Converts the current status to metric families, in the order of the data's way.

    Counters begin at zero with the process and never fall: Prometheus takes a fall for a reset to zero, and would add
    all that the run ever did. The run's totals, which a crash or a rollback takes back, are gauges. Moments are Unix
    time, as `time()` of a query is; their age is measured by the monotonic clock.
    """

    def __init__(self, board: Board, jobs: JobQueue, clock: Clock) -> None:
        self._board = board
        self._jobs = jobs
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """All metric families, from one status."""
        status = self._board.read()
        yield from self._health(status)
        yield from _stream(status)
        yield from self._progress(status)
        yield from adaptation_metrics(status)
        yield from _snapshots(status)
        yield from request_metrics(status)
        yield from self._jobs_waiting(status)
        if status.publication is not None:
            yield from publication_metrics(status.publication)
        if status.trackers:
            yield from tracker_metrics(status.trackers)
        yield _build(status)

    def _health(self, status: Status) -> Iterator[Metric]:
        ready = self._board.why_not_ready() is None
        yield gauge("ready", "1 while jobs are accepted; /readyz gives the reason when it is 0.", ready)
        degraded = "1 while something cannot be written; /v1/status says what."
        yield gauge("degraded", degraded, bool(status.degraded))
        current = "1 for the current phase of the training loop: " + ", ".join(Phase) + "."
        yield gauges("phase", current, ["phase"], [([phase], status.phase is phase) for phase in Phase])
        beat = "When the training loop last reported, Unix time."
        yield gauge("heartbeat_timestamp_seconds", beat, self._clock.wall() - self._board.heartbeat_age_s)

    def _progress(self, status: Status) -> Iterator[Metric]:
        counts = status.counts
        yield counter("steps", "Optimizer updates.", counts.steps)
        last = "When this process made its last optimizer update, Unix time; absent before the first."
        yield gauge("last_step_timestamp_seconds", last, self._unix_time(status.last_step_at))
        yield histogram("step_seconds", "Duration of a training step, from batch to update.", status.step_seconds)
        yield counter("records_trained", "Records that an update was made from.", counts.records_trained)
        held_out = "Records kept out of training: to measure forgetting, or because their regime is frozen."
        yield counter("records_held_out", held_out, counts.records_held_out)
        yield counter("tokens_trained", "Tokens of records trained on.", counts.tokens_trained)
        refusals = "Updates refused because the loss or a gradient was not finite."
        yield counter("update_refusals", refusals, counts.update_refusals)
        yield from _run_totals(status)
        loss = "Prequential loss of the last batch (before its update), nats per token."
        yield gauge("prequential_loss_nats", loss, status.loss)
        smoothed = "Prequential loss smoothed over recent batches, nats per token."
        yield gauge("prequential_loss_smoothed_nats", smoothed, status.loss_smoothed)

    def _jobs_waiting(self, status: Status) -> Iterator[Metric]:
        yield gauge("jobs_waiting", "Requests in the queue.", len(self._jobs))
        capacity = "Requests that may wait before more are answered with 503."
        yield gauge("jobs_capacity", capacity, self._jobs.size)
        pauses = "Duration of pauses of training for requests, between two steps."
        yield histogram("job_pause_seconds", pauses, status.job_seconds)

    def _unix_time(self, monotonic: float | None) -> float | None:
        return None if monotonic is None else self._clock.wall() - (self._clock.monotonic() - monotonic)


def registry(board: Board, jobs: JobQueue, clock: Clock) -> CollectorRegistry:
    """A registry with the status and the process metrics (memory, CPU, open files)."""
    collectors = CollectorRegistry()
    collectors.register(StatusCollector(board, jobs, clock))
    ProcessCollector(registry=collectors)
    return collectors


def exposition(collectors: CollectorRegistry) -> bytes:
    """All metrics in the Prometheus text format, `CONTENT_TYPE`."""
    return generate_latest(collectors)


def _stream(status: Status) -> Iterator[Metric]:
    rows = [((row.origin.topic, str(row.origin.partition)), row) for row in status.partitions]
    up = None if not rows else all(row.lag is not None for _, row in rows)
    yield gauge("source_up", "1 while the source answers; 0 while the lag of a partition is unknown.", up)
    labels = ["topic", "partition"]
    position = "Offset of the next record to train on."
    yield gauges("position_offset", position, labels, [(origin, row.position) for origin, row in rows])
    lag = "Records between the position and the end of the partition's log; absent while unknown."
    yield gauges("lag_records", lag, labels, [(origin, row.lag) for origin, row in rows])
    counts = status.counts.dead_letters
    reasons = [*Reason, *sorted(counts.keys() - set(Reason))]
    dead = [([reason], counts.get(reason, 0)) for reason in reasons]
    yield counters("records_dead_lettered", "Records set aside as unusable, by reason.", ["reason"], dead)


def _run_totals(status: Status) -> Iterator[Metric]:
    """What the run did in all its processes, less what was taken back."""
    yield gauge("run_steps", "Optimizer updates of the run, across restarts; a rollback takes some back.", status.step)
    records = "Records of the run, across restarts, by what became of them; a rollback takes some back."
    outcomes = {
        "trained": status.records_trained,
        "held_out": status.records_held_out,
        "dead_lettered": status.records_dead_lettered,
    }
    yield gauges("run_records", records, ["outcome"], [([outcome], number) for outcome, number in outcomes.items()])


def _snapshots(status: Status) -> Iterator[Metric]:
    snapshot = status.snapshot
    written = "When the newest snapshot became durable, Unix time."
    yield gauge("last_snapshot_timestamp_seconds", written, snapshot.written_at if snapshot else None)
    held = "Optimizer updates that the newest snapshot holds."
    yield gauge("last_snapshot_step", held, snapshot.step if snapshot else None)
    since = "Records done since the newest snapshot, which a crash would have read again."
    yield gauge("records_since_snapshot", since, status.records_since_snapshot)
    yield histogram("snapshot_write_seconds", "Duration of writing a snapshot.", status.snapshot_seconds)


def _build(status: Status) -> Metric:
    versions = {re.sub(r"\W", "_", name): version for name, version in status.versions.items()}
    setup = {"backbone": status.backbone, "dtype": status.dtype, "device": status.device, "preset": status.preset}
    return info(
        "build", "1, with versions, backbone, dtype, device and adapter preset as labels.", {**versions, **setup}
    )
