"""The published status as Prometheus metrics. Values are read at scrape time; there is no global registry."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from streamlearn.board import Board, Clock
from streamlearn.jobs.queue import JobQueue
from streamlearn.status import ANSWERED_BY, HELD_BACK, AdaptationStatus, Phase, PublicationStatus, Status, TrackerStatus

# Metric families in a few words: one value, values by label, a histogram, one of several states.
#
# Every family is served from the start: without a value it has no sample. docs/metrics.md is generated from them.


PREFIX = "streamlearn_"


def gauge(name: str, documentation: str, value: float | None) -> Metric:
    """A value that goes up and down; None when it is unknown."""
    return GaugeMetricFamily(PREFIX + name, documentation, value=None if value is None else float(value))


def gauges(
    name: str, documentation: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float | None]]
) -> Metric:
    """Values by label; unknown ones are left out."""
    family = GaugeMetricFamily(PREFIX + name, documentation, labels=labels)
    for label_values, value in values:
        if value is not None:
            family.add_metric(label_values, float(value))
    return family


def counter(name: str, documentation: str, value: float) -> Metric:
    """A count; the name gets `_total`."""
    return CounterMetricFamily(PREFIX + name, documentation, value=value)


def counters(
    name: str, documentation: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Counts by label. Give zeros too: rate() needs a first sample."""
    family = CounterMetricFamily(PREFIX + name, documentation, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def info(name: str, documentation: str, labels: Mapping[str, str]) -> Metric:
    """Texts as labels of a constant 1; the name gets `_info`."""
    return InfoMetricFamily(PREFIX + name, documentation, value=dict(labels))


def adaptation_metrics(status: Status) -> Iterator[Metric]:
    yield from _regimes(status.adaptation)
    yield from _holdout(status.adaptation)


def _regimes(adaptation: AdaptationStatus) -> Iterator[Metric]:
    yield gauge("regimes", "Remembered regimes.", len(adaptation.regimes))
    current = adaptation.current.number if adaptation.current else None
    yield gauge("current_regime", "Number of the regime that the stream is in.", current)
    recent = "Prequential loss of a regime's newest records, nats per token."
    losses = [([str(regime.number)], regime.prequential_loss) for regime in adaptation.regimes]
    yield gauges("regime_prequential_loss_nats", recent, ["regime"], losses)
    yield counter("probe_seconds", "Time spent on probing new regimes by this process.", adaptation.probe_seconds)
    in_memory = "Adapters in memory; those of the other regimes are in files (adapter.max_in_memory)."
    yield gauge("adapters_in_memory", in_memory, adaptation.adapters_in_memory)
    reads = (
        "Adapters read back from their files by this process; some in every batch mean that adapter.max_in_memory is "
        "too low."
    )
    yield counter("adapter_reads", reads, adaptation.adapter_reads)


def _holdout(adaptation: AdaptationStatus) -> Iterator[Metric]:
    scored = [([str(regime.number)], regime.now) for regime in adaptation.regimes if regime.now is not None]
    loss = "Loss on a regime's hold-out records at the last scoring, nats per token."
    yield gauges("regime_loss_nats", loss, ["regime"], [(number, now.loss) for number, now in scored])
    accuracy = "Teacher-forced accuracy on a regime's hold-out records at the last scoring, 0 to 1."
    accuracies = [(number, now.accuracy) for number, now in scored]
    yield gauges("regime_accuracy_ratio", accuracy, ["regime"], accuracies)
    forgotten = "Average forgetting (AF): mean over past regimes of best hold-out accuracy minus accuracy now."
    yield gauge("average_forgetting_ratio", forgotten, adaptation.average_forgetting)
    gained = (
        "Backward transfer (BWT): mean over past regimes of hold-out accuracy now minus accuracy at the end of the "
        "segment."
    )
    yield gauge("backward_transfer_ratio", gained, adaptation.backward_transfer)
    canary = "Loss of a regime on a slice of the canaries at the last scoring, nats per token."
    slices = [(str(regime.number), row) for regime in adaptation.regimes for row in regime.canaries]
    losses = [([number, row.slice], row.loss) for number, row in slices]
    yield gauges("canary_loss_nats", canary, ["regime", "slice"], losses)
    backbone = "Loss of the untouched backbone on a slice of the canaries, nats per token."
    untouched = {row.slice: row.backbone_loss for _, row in slices}
    yield gauges("canary_backbone_loss_nats", backbone, ["slice"], [([name], loss) for name, loss in untouched.items()])
    scoring = "Training time spent on scoring hold-out records and canaries by this process; idle time is not counted."
    yield counter("holdout_seconds", scoring, adaptation.holdout_seconds)


def request_metrics(status: Status) -> Iterator[Metric]:
    """How requests were routed, and what answers those that no regime explains."""
    answered = (
        "Prompts and examples of finished evaluations and generations of this process, by whether a regime explained "
        "them and by what answered."
    )
    combinations = [
        ([str(known).lower(), answered_by], status.requests.get((known, answered_by), 0))
        for known, answered_by in product((True, False), ANSWERED_BY)
    ]
    yield counters("requests", answered, ["known", "answered_by"], combinations)
    fallback = status.adaptation.fallback
    uses = "1 for what answers requests that no regime explains: mean, nearest or backbone."
    used = [([name], fallback.answered_by == name) for name in fallback.losses]
    yield gauges("unknown_answered_by", uses, ["answered_by"], used)
    loss = (
        "Loss of the first records of new regimes, before anything is learned from them, by what answers, nats per "
        "token; absent until measured."
    )
    losses = [([name], found) for name, found in fallback.losses.items()]
    yield gauges("unknown_loss_nats", loss, ["answered_by"], losses)


def publication_metrics(publication: PublicationStatus) -> Iterator[Metric]:
    yield gauge("publication_sequence", "Number of the newest publication.", publication.sequence)
    published = [regime for regime in publication.regimes if regime.version is not None]
    yield gauge("published_regimes", "Regimes of which a version is published.", len(published))
    waiting = [regime for regime in publication.regimes if regime.held_back is not None]
    yield gauge("held_back_regimes", "Regimes whose newest version is held back.", len(waiting))
    yield counter("versions_published", "Versions published by this process.", publication.num_published)
    counts = dict(publication.num_held_back)
    held_back = [([reason], counts.get(reason, 0)) for reason in HELD_BACK]
    yield counters("versions_held_back", "Versions held back by this process, by reason.", ["reason"], held_back)
    failing = "1 while the newest snapshot cannot be published; /v1/publication says why."
    yield gauge("publication_failing", failing, bool(publication.fault))
    up = [([replica.url], replica.is_up) for replica in publication.replicas]
    yield gauges("replica_up", "1 while the model server answers.", ["url"], up)
    missing = [([replica.url], replica.wanted - replica.loaded) for replica in publication.replicas]
    lacking = "Published versions that the model server has not loaded."
    yield gauges("replica_missing_versions", lacking, ["url"], missing)


def tracker_metrics(trackers: Sequence[TrackerStatus]) -> Iterator[Metric]:
    failures = [([tracker.name], tracker.failures) for tracker in trackers]
    yield counters("tracker_failures", "Failed writes to an experiment tracker by this process.", ["tracker"], failures)
    dropped = [([tracker.name], tracker.dropped) for tracker in trackers]
    lost = "Samples that an experiment tracker does not get, because too many waited; by this process."
    yield counters("tracker_dropped", lost, ["tracker"], dropped)
    pending = [([tracker.name], tracker.pending) for tracker in trackers]
    yield gauges("tracker_pending", "Samples that wait to be written to an experiment tracker.", ["tracker"], pending)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusCollector(Collector):
    """Converts the current status to metric families, in the order in which the data flows.

    Counts of this process are in `Counters`. The run's totals, which a crash or a rollback takes back, are gauges.
    Moments are Unix time, as `time()` of a query is; their age is measured by the monotonic clock.
    """

    def __init__(self, board: Board, jobs: JobQueue, clock: Clock) -> None:
        self._board = board
        self._jobs = jobs
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        status = self._board.read()
        yield from self._health(status)
        yield from _stream(status)
        yield from self._progress(status)
        yield from adaptation_metrics(status)
        yield from _snapshots(status)
        yield from request_metrics(status)
        yield from self._jobs_waiting()
        if status.publication is not None:
            yield from publication_metrics(status.publication)
        if status.trackers:
            yield from tracker_metrics(status.trackers)
        yield _build(status)

    def _health(self, status: Status) -> Iterator[Metric]:
        ready = self._board.why_not_ready() is None
        yield gauge("ready", "1 while jobs are accepted; /readyz gives the reason when it is 0.", ready)
        degraded = "1 while something cannot be written, or after a thread failed; /v1/status says what."
        yield gauge("degraded", degraded, bool(status.faults))
        current = "1 for the current phase of the training loop: " + ", ".join(Phase) + "."
        yield gauges("phase", current, ["phase"], [([phase], status.phase is phase) for phase in Phase])
        beat = "When the training loop last reported, Unix time."
        yield gauge("heartbeat_timestamp_seconds", beat, self._clock.wall() - self._board.heartbeat_age_s)

    def _progress(self, status: Status) -> Iterator[Metric]:
        last = "When this process made its last optimizer update, Unix time; absent before the first."
        yield gauge("last_step_timestamp_seconds", last, self._unix_time(status.last_step_at))
        yield from _run_totals(status)
        loss = "Prequential loss of the last batch (before its update), nats per token."
        yield gauge("prequential_loss_nats", loss, status.loss)
        smoothed = "Prequential loss smoothed over recent batches, nats per token."
        yield gauge("prequential_loss_smoothed_nats", smoothed, status.loss_smoothed)

    def _jobs_waiting(self) -> Iterator[Metric]:
        yield gauge("jobs_waiting", "Requests in the queue.", len(self._jobs))
        capacity = "Requests that may wait before more are answered with 503."
        yield gauge("jobs_capacity", capacity, self._jobs.size)

    def _unix_time(self, monotonic: float | None) -> float | None:
        return None if monotonic is None else self._clock.wall() - (self._clock.monotonic() - monotonic)


def registry(board: Board, jobs: JobQueue, clock: Clock) -> CollectorRegistry:
    """The registry of the board's counters, with the status and the process (memory, CPU, open files); call it once."""
    collectors = board.counters.registry
    collectors.register(StatusCollector(board, jobs, clock))
    ProcessCollector(registry=collectors)
    return collectors


def exposition(collectors: CollectorRegistry) -> bytes:
    """All metrics in the Prometheus text format, `CONTENT_TYPE`."""
    return generate_latest(collectors)


def _stream(status: Status) -> Iterator[Metric]:
    rows = [((row.topic, str(row.partition)), row) for row in status.partitions]
    up = None if not rows else all(row.lag is not None for _, row in rows)
    yield gauge("source_up", "1 while the source answers; 0 while the lag of a partition is unknown.", up)
    labels = ["topic", "partition"]
    position = "Offset of the next record to train on."
    yield gauges("position_offset", position, labels, [(origin, row.position) for origin, row in rows])
    lag = "Records between the position and the end of the partition's log; absent while unknown."
    yield gauges("lag_records", lag, labels, [(origin, row.lag) for origin, row in rows])


def _run_totals(status: Status) -> Iterator[Metric]:
    """Totals of the run across its processes; a rollback takes some back."""
    yield gauge("run_steps", "Optimizer updates of the run, across restarts; a rollback takes some back.", status.step)
    records = "Records of the run, across restarts, by what became of them; a rollback takes some back."
    outcomes = {
        "trained": status.records_trained,
        "held_out": status.records_held_out,
        "dead_lettered": status.records_dead_lettered,
        "ignored": status.records_ignored,
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


def _build(status: Status) -> Metric:
    versions = {re.sub(r"\W", "_", name): version for name, version in status.versions.items()}
    setup = {"backbone": status.backbone, "dtype": status.dtype, "device": status.device, "preset": status.preset}
    return info(
        "build", "1, with versions, backbone, dtype, device and adapter preset as labels.", {**versions, **setup}
    )
