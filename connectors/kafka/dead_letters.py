"""Dead letters in a Kafka topic: key and value untouched, the reason in headers as Kafka Connect writes them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from kafka.admin import ACLOperation
from kafka.errors import KafkaError

from connectors.dead_letter_backlog import DeadLetterBacklog
from connectors.dead_letter_headers import PREFIX, Origin, headers_of, origin_of, own_headers
from connectors.kafka.clients import (
    CLIENT_ERRORS,
    close_quietly,
    describe,
    is_reachable,
    new_consumer,
    new_producer,
    to_kafka,
)
from connectors.kafka.cluster import Cluster
from streamlearn.errors import CredentialsError, DeadLetterError, SourceError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import TopicPartition
from streamlearn.stream.source import DeadLetter

_BOOTSTRAP_S = 30.0
_MEND_S = 10.0
"""Training stands still meanwhile."""
_POLL_MS = 500
_OPERATIONS = (ACLOperation.READ, ACLOperation.WRITE)  # after an outage the topic is asked what arrived
_MAX_UNACKNOWLEDGED = 1_000
"""So many letters bring about a `flush`."""
_MAX_REQUEST_BYTES = 64 << 20  # the topic's own max.message.bytes decides, not the client
_NO_VALUE = PREFIX + "value.absent"
"""Marks a letter whose record had neither key nor value: kafka-python sends no such thing, so its value is empty."""


class KafkaDeadLetters:
    """A topic that exists. Other daemons may write to it too: a letter is known by the record that it is about."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        """Connect.

        Raises:
            DeadLetterError: no broker, wrong credentials, no such topic, or it may not be read and written.
            CredentialsError: a certificate, a key or the password's file cannot be used.
        """
        self._settings = settings
        self._topic = topic
        self._waiting = DeadLetterBacklog()
        self._sent: list[Any] = []
        self._broken = False
        self._cluster = Cluster(settings)
        self._reader: Any = None
        self._producer: Any = None
        try:
            self._partitions = self._cluster.topics([topic], to=_OPERATIONS)[topic].origins
            self._connect(_BOOTSTRAP_S)
            self._ends = self._end_offsets()
        except CredentialsError:
            self.close()
            raise
        except SourceError as error:
            self.close()
            raise DeadLetterError(f"dead letters must have their topic {topic}: {error}") from error

    def recall(self, mark: Mapping[str, Any] | None) -> frozenset[Origin]:
        """Origins and offsets of the letters behind `mark`; all of them when the mark is of another topic.

        Reads the topic from there to its end, so the first start on a long topic takes its time.

        Raises:
            DeadLetterError: the topic cannot be read.
        """
        try:
            self._ends = self._end_offsets()
            starts = self._starts(mark)
            found = (origin_of(message.headers) for message in self._read(starts))
            return frozenset(origin for origin in found if origin is not None)
        except CLIENT_ERRORS as error:
            raise self._failed("read", error) from error

    def send(self, letter: DeadLetter) -> None:
        """Hand one letter to the producer, which sends it in the background.

        Raises:
            DeadLetterError: too many wait because the brokers take none.
        """
        self._waiting.add(letter)
        if self._broken:
            return
        with suppress(DeadLetterError):  # the next `flush` tells
            self._produce(letter)
            if len(self._sent) >= _MAX_UNACKNOWLEDGED:
                self.flush()

    def flush(self) -> None:
        """Block until the brokers hold every letter. After a failure the topic says which are there; the rest go again.

        Raises:
            DeadLetterError: they did not take one; all are tried again at the next time.
        """
        if self._broken:
            self._mend()
        if not self._waiting:
            return
        try:
            self._producer.flush(timeout=2 * self._settings.request_timeout_ms / 1000)
            for sent in self._sent:
                sent.get(timeout=0)
            self._ends = self._end_offsets()
        except CLIENT_ERRORS as error:
            raise self._failed("written", error) from error
        self._sent.clear()
        self._waiting.clear()

    def mark(self) -> Mapping[str, Any]:
        """The topic's name and the end of each of its partitions at the last `flush`."""
        return {"topic": self._topic, "ends": [[origin.partition, end] for origin, end in self._ends.items()]}

    def close(self) -> None:
        """Close every connection; letters that were not flushed may be lost. Safe to call twice."""
        self._cluster.close()
        self._disconnect()

    def _connect(self, bootstrap_s: float) -> None:
        self._reader = new_consumer(self._settings, bootstrap_s, isolation_level="read_uncommitted")
        self._producer = new_producer(self._settings, bootstrap_s, max_request_size=_MAX_REQUEST_BYTES)

    def _disconnect(self) -> None:
        clients, self._reader, self._producer = (self._reader, self._producer), None, None
        for client in clients:
            if client is not None:
                close_quietly(client)

    def _produce(self, letter: DeadLetter) -> None:
        record = letter.record
        headers = own_headers(record) + [(name, value.encode()) for name, value in headers_of(letter).items()]
        value = record.value
        if value is None and record.key is None:
            headers.append((_NO_VALUE, b"true"))
            value = b""
        try:
            self._sent.append(self._producer.send(self._topic, value, key=record.key, headers=headers))
        except (*CLIENT_ERRORS, ValueError, AssertionError) as error:
            raise self._failed("written", error) from error

    def _mend(self) -> None:
        """New clients after a failure, and what is not in the topic sent again.

        Raises:
            DeadLetterError: the cluster does not answer yet.
        """
        self._disconnect()
        self._sent.clear()
        if not is_reachable(self._settings):
            raise self._failed("written", KafkaError("no broker accepts a connection"))
        try:
            self._connect(_MEND_S)
        except SourceError as error:
            raise self._failed("written", error) from error
        self._waiting.drop(self.recall(self.mark()))
        self._broken = False
        for letter in self._waiting:
            self._produce(letter)

    def _end_offsets(self) -> dict[TopicPartition, int]:
        ends = self._reader.end_offsets([to_kafka(origin) for origin in self._partitions])
        return {origin: ends[to_kafka(origin)] for origin in self._partitions}

    def _starts(self, mark: Mapping[str, Any] | None) -> dict[TopicPartition, int]:
        """Where to read each partition from: the mark, as far as the log still holds it."""
        begins = self._reader.beginning_offsets([to_kafka(origin) for origin in self._partitions])
        marked = dict(mark["ends"]) if mark is not None and mark.get("topic") == self._topic else {}
        starts = {}
        for origin in self._partitions:
            begin, start = begins[to_kafka(origin)], marked.get(origin.partition, 0)
            starts[origin] = start if begin <= start <= self._ends[origin] else begin
        return starts

    def _read(self, starts: Mapping[TopicPartition, int]) -> Iterator[Any]:
        """Every message from `starts` to the known ends, by our own assignment."""
        waiting = {
            to_kafka(origin): self._ends[origin] for origin, start in starts.items() if start < self._ends[origin]
        }
        self._reader.assign(list(waiting))
        for partition in waiting:
            self._reader.seek(partition, starts[TopicPartition(*partition)])
        patience_ms = self._settings.request_timeout_ms
        while waiting:
            messages = self._reader.poll(timeout_ms=_POLL_MS)
            for batch in messages.values():
                yield from batch
            patience_ms = self._settings.request_timeout_ms if messages else patience_ms - _POLL_MS
            if patience_ms <= 0:
                raise KafkaError(f"no message for {self._settings.request_timeout_ms} ms before the end of the topic")
            waiting = {partition: end for partition, end in waiting.items() if self._reader.position(partition) < end}

    def _failed(self, what: str, error: Exception) -> DeadLetterError:
        self._broken = True
        said = str(error) if isinstance(error, SourceError) else describe(error)
        return DeadLetterError(f"dead letters cannot be {what}: topic {self._topic}: {said}")
