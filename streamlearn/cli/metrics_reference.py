"""The reference of all Prometheus metrics, generated from the collectors of the daemon and the gateway.

python -m streamlearn.commands.metrics_reference
"""

import sys
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from streamlearn.gateway.upstreams import GatewayMetrics
from streamlearn.jobs.queue import JobQueue
from streamlearn.serve.metrics import registry
from streamlearn.status import Board, Clock, Phase, PublicationStatus, Status, TrackerStatus

_SUFFIXES = {"counter": "_total", "info": "_info"}


def daemon_registry() -> CollectorRegistry:
    """What a daemon that publishes and is tracked exports before it has learned anything: every family, few samples."""
    status = Status(Phase.STARTING, publication=PublicationStatus(), trackers=(TrackerStatus("NAME"),))
    board = Board(status, Clock())
    return registry(board, JobQueue(1), Clock())


def gateway_registry() -> CollectorRegistry:
    """What a gateway without model servers exports."""
    metrics = GatewayMetrics()
    metrics.watch(lambda: iter(()))
    return metrics.registry


def families(collectors: CollectorRegistry) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name as it is queried, type, labels and meaning of every family."""
    for collector in collectors._collector_to_names:  # prometheus_client has no public way to its labels
        for family in collector.collect():
            labels = getattr(family, "_labelnames", ()) or getattr(collector, "_labelnames", ())
            yield _name(family), "gauge" if family.type == "info" else family.type, tuple(labels), family.documentation


def reference() -> str:
    """Two Markdown tables: the daemon's metrics, and the gateway's."""
    parts = [("The daemon", daemon_registry()), ("The gateway", gateway_registry())]
    return "\n".join(f"## {title}\n\n{_table(collectors)}" for title, collectors in parts)


def _table(collectors: CollectorRegistry) -> str:
    rows = [
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |".replace("|  |", "| |")
        for name, kind, labels, meaning in families(collectors)
    ]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _name(family: Metric) -> str:
    return family.name + _SUFFIXES.get(family.type, "")


if __name__ == "__main__":
    sys.stdout.write(reference())
