"""Producing of records to a topic; each is durable before it is counted."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kafka.admin import ACLOperation

from connectors.kafka.admin import Cluster
from connectors.kafka.clients import CLIENT_ERRORS, close_quietly, describe, new_producer
from connectors.rows import FeedRecord
from streamlearn.errors import SourceError
from streamlearn.settings import KafkaSettings

_BOOTSTRAP_S = 30.0
_MAX_IN_FLIGHT = 2_000
"""Maximum number of unacknowledged records; the producer itself buffers without limit."""
_MAX_IN_FLIGHT_BYTES = 64 << 20
"""Maximum size of their values; one record may exceed it."""
_REPORT_S = 0.2


@dataclass(frozen=True, slots=True)
class FeedResult:
    """Counts of the records that were sent."""

    sent: int
    acknowledged: int
    """Records that all in-sync replicas hold."""
    seconds: float


def feed(
    settings: KafkaSettings,
    topic: str,
    records: Iterable[FeedRecord],
    *,
    report: Callable[[FeedResult], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> FeedResult:
    """Produce every record as a value without a key, and block until the brokers hold them all.

    Records of one partition keep their order. `report` is called a few times a second.

    Raises:
        SourceError: no broker, no such topic, or the brokers refused a record; the message says where it was read.
    """
    cluster = Cluster(settings)
    try:
        cluster.topics([topic], to=[ACLOperation.WRITE])
    finally:
        cluster.close()
    producer = new_producer(settings, _BOOTSTRAP_S, linger_ms=5)
    try:
        return _Feed(producer, topic, report, clock).run(records)
    finally:
        close_quietly(producer)


class _Feed:
    """Records in flight."""

    def __init__(
        self, producer: Any, topic: str, report: Callable[[FeedResult], None], clock: Callable[[], float]
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._report = report
        self._clock = clock
        self._in_flight: deque[tuple[Any, FeedRecord]] = deque()
        self._bytes = 0
        self._sent = 0
        self._acknowledged = 0
        self._started = self._reported = clock()

    def run(self, records: Iterable[FeedRecord]) -> FeedResult:
        for record in records:
            self._send(record)
            while self._in_flight and self._in_flight[0][0].is_done:
                self._settle()
            while len(self._in_flight) > _MAX_IN_FLIGHT or (self._bytes > _MAX_IN_FLIGHT_BYTES and self._in_flight):
                self._settle()
            if self._clock() - self._reported > _REPORT_S:
                self._reported = self._clock()
                self._report(self._result)
        while self._in_flight:
            self._settle()
        self._report(self._result)
        return self._result

    @property
    def _result(self) -> FeedResult:
        return FeedResult(self._sent, self._acknowledged, self._clock() - self._started)

    def _send(self, record: FeedRecord) -> None:
        try:
            future = self._producer.send(self._topic, record.value)
        except CLIENT_ERRORS as error:
            while self._in_flight:
                self._settle()
            raise self._refused(record, error) from error
        self._in_flight.append((future, record))
        self._bytes += len(record.value)
        self._sent += 1

    def _settle(self) -> None:
        """Wait for the oldest acknowledgement."""
        future, record = self._in_flight[0]
        try:
            future.get()
        except CLIENT_ERRORS as error:
            raise self._refused(record, error) from error
        self._in_flight.popleft()
        self._bytes -= len(record.value)
        self._acknowledged += 1

    def _refused(self, record: FeedRecord, error: Exception) -> SourceError:
        return SourceError(
            f"topic {self._topic} refused {record.place}: {describe(error)}. The {self._acknowledged} records before "
            "it are in the topic; some after it may be too"
        )
