"""Experiment trackers as Prometheus metrics. They are served if `track` is configured."""

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric

from streamlearn.serve.metric_families import counters, gauges
from streamlearn.status.tracker_status import TrackerStatus


def tracker_metrics(trackers: Sequence[TrackerStatus]) -> Iterator[Metric]:
    """What each tracker got, and what it lacks."""
    failures = [([each.name], each.failures) for each in trackers]
    yield counters("tracker_failures", "Failed writes to an experiment tracker by this process.", ["tracker"], failures)
    dropped = [([each.name], each.dropped) for each in trackers]
    lost = "Samples that an experiment tracker does not get, because too many waited; by this process."
    yield counters("tracker_dropped", lost, ["tracker"], dropped)
    pending = [([each.name], each.pending) for each in trackers]
    yield gauges("tracker_pending", "Samples that wait to be written to an experiment tracker.", ["tracker"], pending)
