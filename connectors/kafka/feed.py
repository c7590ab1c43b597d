"""Producing of JSONL lines to a topic; each line is durable before it is counted."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kafka.admin import ACLOperation

from connectors.kafka.clients import CLIENT_ERRORS, close_quietly, describe, new_producer
from connectors.kafka.cluster import Cluster
from streamlearn.errors import SourceError
from streamlearn.settings import KafkaSettings

_BOOTSTRAP_S = 30.0
_MAX_IN_FLIGHT = 2_000
"""Maximum number of unacknowledged lines; the producer itself buffers without limit."""


def feed(
    settings: KafkaSettings,
    topic: str,
    lines: Iterable[bytes],
    *,
    report: Callable[[int], None] | None = None,
) -> int:
    """Produce every line as a value without a key; return the number of lines.

    Lines of one partition keep their order. `report` is called with the number acknowledged so far, every thousand
    lines and at the end. Blocks until the brokers hold every line.

    Raises:
        SourceError: no broker, no such topic, or the brokers refused a line; the message gives its number, from 0.
    """
    cluster = Cluster(settings)
    try:
        cluster.topics([topic], to=[ACLOperation.WRITE])
    finally:
        cluster.close()
    producer = new_producer(settings, _BOOTSTRAP_S, linger_ms=5)
    try:
        return _produce(producer, topic, lines, report or (lambda _: None))
    finally:
        close_quietly(producer)


def _produce(producer: Any, topic: str, lines: Iterable[bytes], report: Callable[[int], None]) -> int:
    in_flight: deque[Any] = deque()
    acknowledged = 0

    def settle(keep: int) -> None:
        nonlocal acknowledged
        while len(in_flight) > keep:
            try:
                in_flight[0].get()
            except CLIENT_ERRORS as error:
                raise _refused(topic, acknowledged, error) from error
            in_flight.popleft()
            acknowledged += 1

    for line in lines:
        try:
            in_flight.append(producer.send(topic, line))
        except CLIENT_ERRORS as error:
            settle(0)
            raise _refused(topic, acknowledged, error) from error
        if len(in_flight) == _MAX_IN_FLIGHT:
            settle(_MAX_IN_FLIGHT // 2)
            report(acknowledged)
    settle(0)
    report(acknowledged)
    return acknowledged


def _refused(topic: str, number: int, error: Exception) -> SourceError:
    return SourceError(
        f"topic {topic} refused line {number}: {describe(error)}. The {number} lines before it are in the topic; some "
        "lines after it may be too"
    )
