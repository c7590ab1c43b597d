"""Regimes, shifts, forgetting and the routing of requests as Prometheus metrics."""

from collections.abc import Iterator
from itertools import product

from prometheus_client.metrics_core import Metric

from streamlearn.serve.metric_families import counter, counters, gauge, gauges
from streamlearn.status.process_counts import ProcessCounts
from streamlearn.status.status import ANSWERED_BY, SHIFT_KINDS, AdaptationStatus, Status


def adaptation_metrics(status: Status) -> Iterator[Metric]:
    """What is known of the stream's regimes."""
    yield from _shifts(status.counts)
    yield from _regimes(status.adaptation)
    yield from _holdout(status.adaptation)


def _shifts(counts: ProcessCounts) -> Iterator[Metric]:
    detected = (
        "Detected shifts of the stream, by kind: inputs (another regime) and answers (concept drift); the first regime "
        "is not counted."
    )
    yield counters("shifts", detected, ["kind"], [([kind], counts.shifts.get(kind, 0)) for kind in SHIFT_KINDS])


def _regimes(adaptation: AdaptationStatus) -> Iterator[Metric]:
    yield gauge("regimes", "Remembered regimes.", len(adaptation.regimes))
    current = adaptation.current.number if adaptation.current else None
    yield gauge("current_regime", "Number of the regime that the stream is in.", current)
    recent = "Prequential loss of a regime's newest records, nats per token."
    losses = [([str(regime.number)], regime.prequential_loss) for regime in adaptation.regimes]
    yield gauges("regime_prequential_loss_nats", recent, ["regime"], losses)
    yield counter("probe_seconds", "Time spent on probing new regimes by this process.", adaptation.probe_seconds)
    in_memory = "Adapters in memory; those of the other regimes rest in files (adapter.max_in_memory)."
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
    scoring = "Training time spent on scoring hold-out records by this process; idle time is not counted."
    yield counter("holdout_seconds", scoring, adaptation.holdout_seconds)


def request_metrics(status: Status) -> Iterator[Metric]:
    """How requests were routed, and what answers those that no regime explains."""
    answered = (
        "Prompts and examples of finished evaluations and generations of this process, by whether a regime explained "
        "them and by what answered."
    )
    numbers = {(each.known, each.answered_by): each.number for each in status.requests}
    combinations = [
        ([str(known).lower(), answered_by], numbers.get((known, answered_by), 0))
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
