"""Metric families in a few words: one value, values by label, a histogram, one of several states.

Every family is served from the start: without a value it has no sample. docs/metrics.md is generated from them.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from streamlearn.status.timing import BUCKETS_S, Timing

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


def histogram(name: str, documentation: str, timing: Timing) -> Metric:
    """Durations by `BUCKETS_S`."""
    upper_bounds = [*map(str, BUCKETS_S), "+Inf"]
    buckets = list(zip(upper_bounds, map(float, accumulate(timing.counts)), strict=True))
    return HistogramMetricFamily(PREFIX + name, documentation, buckets=buckets, sum_value=timing.total_s)


def info(name: str, documentation: str, labels: Mapping[str, str]) -> Metric:
    """Texts as labels of a constant 1; the name gets `_info`."""
    return InfoMetricFamily(PREFIX + name, documentation, value=dict(labels))
