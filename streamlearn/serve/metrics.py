"""The published status as Prometheus metrics. Values are read at scrape time; there is no global registry."""

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from streamlearn.errors import Reason
from streamlearn.jobs.queue import JobQueue
from streamlearn.status.board import Board, Clock
from streamlearn.status.publication_status import HELD_BACK, PublicationStatus
from streamlearn.status.status import ANSWERED_BY, SHIFT_KINDS, AdaptationStatus, Phase, Status
from streamlearn.status.timing import BUCKETS_S, Timing
from streamlearn.status.tracker_status import TrackerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusCollector(Collector):
    """Converts the current status to metric families.

    Counters are over the learner's lifetime. They decrease after a crash or a rollback, which Prometheus treats as a
    counter reset.
    """

    def __init__(self, board: Board, jobs: JobQueue, clock: Clock) -> None:
        self._board = board
        self._jobs = jobs
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """All metric families, from one status."""
        status = self._board.read()
        yield from self._health(status)
        yield from _progress(status)
        yield from _stream(status)
        yield from _regimes(status.adaptation)
        yield from _requests(status)
        if status.publication is not None:
            yield from _publication(status.publication)
        if status.trackers:
            yield from _trackers(status.trackers)
        yield from self._snapshots(status)
        yield _build(status)

    def _health(self, status: Status) -> Iterator[Metric]:
        yield _gauge(
            "ready", "Whether the daemon accepts jobs; /readyz has the reason.", self._board.why_not_ready() is None
        )
        yield _gauge("degraded", "Whether something cannot be written; /v1/status has details.", bool(status.degraded))
        phases = GaugeMetricFamily("streamlearn_phase", "Current phase of the training loop.", labels=["phase"])
        for phase in Phase:
            phases.add_metric([phase], float(status.phase is phase))
        yield phases
        yield _gauge("start_time_seconds", "Start time of the daemon, Unix time.", status.started_at)
        age = self._board.heartbeat_age_s
        yield _gauge("heartbeat_age_seconds", "Time since the training loop last reported.", age)
        yield _gauge("jobs_waiting", "Jobs in the queue.", len(self._jobs))
        yield _gauge("jobs_capacity", "Maximum number of queued jobs.", self._jobs.size)
        yield _timing("job_pause_seconds", "Duration of pauses of training for jobs.", status.job_seconds)

    def _snapshots(self, status: Status) -> Iterator[Metric]:
        if status.snapshot is not None:
            age = max(0.0, self._clock.wall() - status.snapshot.written_at)
            yield _gauge("last_snapshot_age_seconds", "Age of the newest durable snapshot.", age)
            yield _gauge("last_snapshot_step", "Optimizer updates in the newest snapshot.", status.snapshot.step)
        yield _timing("snapshot_write_seconds", "Duration of writing a snapshot.", status.snapshot_seconds)


def registry(board: Board, jobs: JobQueue, clock: Clock) -> CollectorRegistry:
    """A registry with the status and the process metrics (memory, CPU, open files)."""
    collectors = CollectorRegistry()
    collectors.register(StatusCollector(board, jobs, clock))
    ProcessCollector(registry=collectors)
    return collectors


def exposition(collectors: CollectorRegistry) -> bytes:
    """All metrics in the Prometheus text format, `CONTENT_TYPE`."""
    return generate_latest(collectors)


def _progress(status: Status) -> Iterator[Metric]:
    yield _counter("steps", "Optimizer updates.", status.step)
    yield _counter("records_trained", "Records trained on.", status.records_trained)
    held_out = "Records kept out of training: to measure forgetting, or because their regime is frozen."
    yield _counter("records_held_out", held_out, status.records_held_out)
    yield _counter("tokens_trained", "Tokens of records trained on.", status.tokens_trained)
    yield _gauge("tokens_per_second", "Recent training throughput.", status.tokens_per_s)
    refusals = "Updates skipped because the loss or a gradient was not finite."
    yield _counter("update_refusals", refusals, status.update_refusals)
    yield _timing("step_seconds", "Duration of a training step, from batch to update.", status.step_seconds)
    if status.loss is not None:
        last = "Prequential loss of the last batch (before its update), nats per token."
        yield _gauge("prequential_loss_nats", last, status.loss)
    if status.loss_smoothed is not None:
        smoothed = "Prequential loss smoothed over recent batches, nats per token."
        yield _gauge("prequential_loss_smoothed_nats", smoothed, status.loss_smoothed)


def _stream(status: Status) -> Iterator[Metric]:
    dead = CounterMetricFamily("streamlearn_records_dead_lettered", "Unusable records, by reason.", labels=["reason"])
    for reason in [
        *Reason,
        *sorted(status.dead_letters.keys() - set(Reason)),
    ]:  # zeros too: rate() needs a first sample
        dead.add_metric([reason], status.dead_letters.get(reason, 0))
    yield dead
    labels = ["topic", "partition"]
    position = "Offset of the next record to train on."
    positions = GaugeMetricFamily("streamlearn_position_offset", position, labels=labels)
    lag = "Records between the position and the end of the partition's log."
    lags = GaugeMetricFamily("streamlearn_lag_records", lag, labels=labels)
    for row in status.partitions:
        origin = [row.origin.topic, str(row.origin.partition)]
        positions.add_metric(origin, row.position)
        if row.lag is not None:
            lags.add_metric(origin, row.lag)
    yield positions
    yield lags


def _regimes(adaptation: AdaptationStatus) -> Iterator[Metric]:
    yield _gauge("regimes", "Remembered regimes.", len(adaptation.regimes))
    if adaptation.current is not None:
        yield _gauge("current_regime", "Number of the regime that the stream is in.", adaptation.current.number)
    in_memory = "Adapters in memory; those of the other regimes rest in files."
    yield _gauge("adapters_in_memory", in_memory, adaptation.adapters_in_memory)
    reads = "Adapters read back from their files by this process."
    yield _counter("adapter_reads", reads, adaptation.adapter_reads)
    detected = "Detected shifts of the stream, by kind; the first regime is not counted."
    shifts = CounterMetricFamily("streamlearn_shifts", detected, labels=["kind"])
    for kind in SHIFT_KINDS:  # zeros too: rate() needs a first sample
        shifts.add_metric([kind], adaptation.num_shifts.get(kind, 0))
    yield shifts
    loss = "Loss on a regime's hold-out records at the last scoring, nats per learned token."
    losses = GaugeMetricFamily("streamlearn_regime_loss", loss, labels=["regime"])
    accuracy = "Teacher-forced accuracy on a regime's hold-out records at the last scoring, 0 to 1."
    accuracies = GaugeMetricFamily("streamlearn_regime_accuracy", accuracy, labels=["regime"])
    for regime in adaptation.regimes:
        if regime.now is not None:
            losses.add_metric([str(regime.number)], regime.now.loss)
            accuracies.add_metric([str(regime.number)], regime.now.accuracy)
    yield losses
    yield accuracies
    if adaptation.average_forgetting is not None:
        forgotten = "Mean over past regimes of best hold-out accuracy minus accuracy now."
        yield _gauge("average_forgetting", forgotten, adaptation.average_forgetting)
    if adaptation.backward_transfer is not None:
        gained = "Mean over past regimes of hold-out accuracy now minus accuracy at the end of the segment."
        yield _gauge("backward_transfer", gained, adaptation.backward_transfer)
    yield _counter("probe_seconds", "Time spent on probing new regimes by this process.", adaptation.probe_seconds)
    scoring = "Training time spent on scoring hold-out records by this process; idle time is not counted."
    yield _counter("holdout_seconds", scoring, adaptation.holdout_seconds)


def _requests(status: Status) -> Iterator[Metric]:
    answered = "Prompts and examples of finished evaluations and generations, by whether a regime explained them."
    requests = CounterMetricFamily("streamlearn_requests", answered, labels=["known", "answered_by"])
    numbers = {(each.known, each.answered_by): each.number for each in status.requests}
    for known, answered_by in product((True, False), ANSWERED_BY):  # zeros too: rate() needs a first sample
        requests.add_metric([str(known).lower(), answered_by], numbers.get((known, answered_by), 0))
    yield requests
    fallback = status.adaptation.fallback
    uses = "1 for what answers requests that no regime explains."
    used = GaugeMetricFamily("streamlearn_unknown_answered_by", uses, labels=["answered_by"])
    loss = "Loss of the first records of new regimes, by what answers, nats per learned token."
    losses = GaugeMetricFamily("streamlearn_unknown_loss", loss, labels=["answered_by"])
    for name, found in fallback.losses.items():
        used.add_metric([name], float(fallback.answered_by == name))
        if found is not None:
            losses.add_metric([name], found)
    yield used
    yield losses


def _publication(publication: PublicationStatus) -> Iterator[Metric]:
    if publication.sequence is not None:
        yield _gauge("publication_sequence", "Number of the newest publication.", publication.sequence)
    published = [regime for regime in publication.regimes if regime.version is not None]
    yield _gauge("published_regimes", "Regimes of which a version is published.", len(published))
    waiting = [regime for regime in publication.regimes if regime.held_back is not None]
    yield _gauge("held_back_regimes", "Regimes whose newest version is held back.", len(waiting))
    yield _counter("versions_published", "Versions published by this process.", publication.num_published)
    help_text = "Versions held back by this process, by reason."
    held_back = CounterMetricFamily("streamlearn_versions_held_back", help_text, labels=["reason"])
    counts = dict(publication.num_held_back)
    for reason in HELD_BACK:  # zeros too: rate() needs a first sample
        held_back.add_metric([reason], counts.get(reason, 0))
    yield held_back
    yield _gauge("publication_failing", "Whether the newest snapshot cannot be published.", bool(publication.fault))
    up = GaugeMetricFamily("streamlearn_replica_up", "Whether the model server answers.", labels=["url"])
    lacking = "Published versions that the model server has not loaded."
    missing = GaugeMetricFamily("streamlearn_replica_missing_versions", lacking, labels=["url"])
    for replica in publication.replicas:
        up.add_metric([replica.url], float(replica.is_up))
        missing.add_metric([replica.url], float(replica.wanted - replica.loaded))
    yield up
    yield missing


def _trackers(trackers: Iterable[TrackerStatus]) -> Iterator[Metric]:
    about = "of the experiment tracker, by this process."
    failures = CounterMetricFamily("streamlearn_tracker_failures", f"Failed writes {about}", labels=["tracker"])
    dropped = CounterMetricFamily("streamlearn_tracker_dropped", f"Samples dropped {about}", labels=["tracker"])
    pending = GaugeMetricFamily("streamlearn_tracker_pending", "Samples that wait to be written.", labels=["tracker"])
    for tracker in trackers:
        failures.add_metric([tracker.name], tracker.failures)
        dropped.add_metric([tracker.name], tracker.dropped)
        pending.add_metric([tracker.name], tracker.pending)
    yield failures
    yield dropped
    yield pending


def _build(status: Status) -> Metric:
    versions = {re.sub(r"\W", "_", name): version for name, version in status.versions.items()}
    setup = {"backbone": status.backbone, "dtype": status.dtype, "device": status.device, "preset": status.preset}
    return InfoMetricFamily(
        "streamlearn_build", "Versions, backbone, dtype, device and adapter preset.", value={**versions, **setup}
    )


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"streamlearn_{name}", documentation, value=float(value))


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(f"streamlearn_{name}", documentation, value=value)


def _timing(name: str, documentation: str, timing: Timing) -> Metric:
    upper_bounds = [*map(str, BUCKETS_S), "+Inf"]
    buckets = list(zip(upper_bounds, map(float, accumulate(timing.counts)), strict=True))
    return HistogramMetricFamily(f"streamlearn_{name}", documentation, buckets=buckets, sum_value=timing.total_s)
