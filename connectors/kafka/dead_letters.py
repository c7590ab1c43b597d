"""Dead letters in a Kafka topic: key and value unchanged, the reason in headers like Kafka Connect's.

A record may be larger than the dead-letter topic allows: the limits of two topics differ, and a compressed record has
its full size here. Such a dead letter is written without the record's key, value and headers, but with its place and
size.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kafka.admin import ACLOperation
from kafka.errors import KafkaError, MessageSizeTooLargeError, RecordListTooLargeError

from connectors.dead_letters import (
    LEFT_OUT_BYTES,
    PREFIX,
    DeadLetterBacklog,
    from_headers,
    headers_of,
    own_headers,
    record_of,
    text_of,
)
from connectors.kafka.admin import Cluster
from connectors.kafka.batches import NullHeader
from connectors.kafka.clients import (
    CLIENT_ERRORS,
    close_quietly,
    describe,
    is_reachable,
    new_consumer,
    new_producer,
    wait_until_reachable,
)
from connectors.kafka.offsets import beginning_offsets, end_offsets, read_between
from streamlearn.errors import CredentialsError, DeadLetterError, SourceError
from streamlearn.events import Event, get_logger
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import RecordId, TopicPartition
from streamlearn.stream.source import DeadLetter

_CONNECT_PREFIX = "__connect.errors."
_CONNECT_CONSTANTS = {
    "connector.name": "streamlearn",
    "task.id": "0",
    "class.name": "streamlearn.stream.decode.Decoder",
}
_NO_VALUE = PREFIX + "value.absent"
"""Marks a record without key and value. kafka-python cannot send such a message, so its value is empty."""
_MAX_CHARACTERS = 200
"""Of the reason's text in a shortened dead letter, which then has less than 2 kB."""


_Headers = list[tuple[str, bytes]]
_Message = tuple[bytes | None, bytes | None, _Headers]
"""Value, key and headers of a message."""


def _message(dead_letter: DeadLetter) -> _Message:
    record = dead_letter.record
    own = [(name, NullHeader() if value is None else value) for name, value in own_headers(record)]
    headers = own + _reason(dead_letter)
    if record.value is None and record.key is None:
        return b"", None, [*headers, (_NO_VALUE, b"true")]
    return record.value, record.key, headers


def _shortened_message(dead_letter: DeadLetter) -> _Message:
    """The reason, where the record was read, and the size of its value; any topic accepts that."""
    size = len(dead_letter.record.value or b"")
    headers = _reason(replace(dead_letter, message=dead_letter.message[:_MAX_CHARACTERS]))
    return b"", None, [*headers, (LEFT_OUT_BYTES, b"%d" % size)]


def _reason(dead_letter: DeadLetter) -> _Headers:
    """Our headers, then those of the same meaning that Kafka Connect writes, which its tools read."""
    ours = headers_of(dead_letter)
    connect = {name.removeprefix(PREFIX): value for name, value in ours.items() if name != f"{PREFIX}timestamp"}
    both = ours | {_CONNECT_PREFIX + name: value for name, value in (connect | _CONNECT_CONSTANTS).items()}
    return [(name, value.encode()) for name, value in both.items()]


_BOOTSTRAP_S = 30.0
_RECONNECT_S = 10.0
"""Timeout of a reconnection, during which training waits."""
_OPERATIONS = (ACLOperation.READ, ACLOperation.WRITE)  # READ: after an outage the topic is read for what arrived
_MAX_UNACKNOWLEDGED = 1_000
"""Number of unacknowledged dead letters that triggers a `flush`."""
_TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)


class KafkaDeadLetters:
    """An existing topic. Other daemons may write to it too: a dead letter is identified by its record."""

    def __init__(
        self,
        settings: KafkaSettings,
        topic: str,
        *,
        start_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connect; wait for an unreachable broker for at most `start_timeout_s`.

        Raises:
            DeadLetterError: no broker, wrong credentials, no such topic, or READ or WRITE is not allowed on it.
            CredentialsError: a certificate, a key or the password file cannot be used.
        """
        self._settings = settings
        self._topic = topic
        self._backlog = DeadLetterBacklog()
        self._sent: list[tuple[DeadLetter, Any]] = []
        self._too_large: set[RecordId] = set()
        self._failed = False
        self._is_idempotent = True
        self._cluster = Cluster(settings)
        self._reader: Any = None
        self._producer: Any = None
        self._log = get_logger("connectors")
        try:
            wait_until_reachable(settings, start_timeout_s, on_wait=self._log_unreachable, clock=clock, sleep=sleep)
            self._partitions = self._cluster.topics([topic], to=_OPERATIONS)[topic].origins
            self._connect(_BOOTSTRAP_S)
            self._ends = self._end_offsets()
        except CredentialsError:
            self.close()
            raise
        except (SourceError, *CLIENT_ERRORS) as error:
            self.close()
            raise DeadLetterError(f"the dead-letter topic {topic} must be usable: {describe(error)}") from error

    def recall(self, mark: Mapping[str, Any] | None) -> frozenset[RecordId]:
        """Records of the dead letters after `mark`; all of them when the mark belongs to another topic.

        Reads the topic from there to its end, so the first start on a long topic may take long.

        Raises:
            DeadLetterError: the topic cannot be read.
        """
        try:
            ends = self._end_offsets()
            timeout_ms = self._settings.request_timeout_ms
            messages = read_between(self._reader, self._starts(mark, ends), ends, timeout_ms=timeout_ms)
            records = [record_of(message.headers) for message in messages]
        except CLIENT_ERRORS as error:
            raise self._fail("read", error) from error
        self._ends = ends  # only now: a reading that failed begins again at the old ends
        return frozenset(record for record in records if record is not None)

    def send(self, dead_letter: DeadLetter) -> None:
        """Give one dead letter to the producer, which sends it in the background; a full backlog is flushed first.

        Raises:
            DeadLetterError: the backlog is full because the brokers accept none.
        """
        if not self._backlog.has_room_for(dead_letter):
            with suppress(DeadLetterError):  # `add` raises one that says what to do
                self.flush()
        self._backlog.add(dead_letter)
        if self._failed:
            return
        with suppress(DeadLetterError):  # the next `flush` raises it
            self._produce(dead_letter)
            if len(self._sent) >= _MAX_UNACKNOWLEDGED:
                self.flush()

    def flush(self) -> None:
        """Block until the brokers hold every dead letter; one that is too large for the topic without its content.

        After a failure the topic is read for those that arrived, and the others are sent again.

        Raises:
            DeadLetterError: one was not accepted; the next call tries again.
        """
        if self._failed:
            self._reconnect()
        if not self._backlog:
            return
        try:
            self._await_acknowledgements()
            self._ends = self._end_offsets()
        except CLIENT_ERRORS as error:
            raise self._fail("written", error) from error
        self._sent.clear()
        self._too_large.clear()
        self._backlog.clear()

    def mark(self) -> Mapping[str, Any]:
        """The topic's name and the end of each of its partitions at the last `flush`."""
        return {"topic": self._topic, "ends": [[origin.partition, end] for origin, end in self._ends.items()]}

    def close(self) -> None:
        """Close every connection; dead letters that were not flushed may be lost. Safe to call twice."""
        self._cluster.close()
        self._disconnect()

    def _log_unreachable(self) -> None:
        servers = self._settings.bootstrap_servers
        self._log.warning(Event.SOURCE_UNREACHABLE, servers=servers, reason="no broker accepts a connection")

    def _connect(self, bootstrap_s: float, *, idempotent: bool = True) -> None:
        """Build the clients. A producer that is not idempotent never repeats a request: that could write it twice."""
        once = {} if idempotent else {"enable_idempotence": False, "retries": 0}
        self._is_idempotent = idempotent
        self._reader = new_consumer(self._settings, bootstrap_s, isolation_level="read_uncommitted")
        self._producer = new_producer(self._settings, bootstrap_s, **once)

    def _disconnect(self) -> None:
        clients, self._reader, self._producer = (self._reader, self._producer), None, None
        for client in clients:
            if client is not None:
                close_quietly(client)

    def _produce(self, dead_letter: DeadLetter) -> None:
        shortened = dead_letter.record.id in self._too_large
        value, key, headers = (_shortened_message if shortened else _message)(dead_letter)
        try:
            self._sent.append((dead_letter, self._producer.send(self._topic, value, key=key, headers=headers)))
        except _TOO_LARGE:
            self._shorten(dead_letter)
        except (*CLIENT_ERRORS, ValueError, AssertionError) as error:
            raise self._fail("written", error) from error

    def _shorten(self, dead_letter: DeadLetter) -> None:
        """Send again what was refused as too large, without its content."""
        record = dead_letter.record
        assert record.id not in self._too_large, "a shortened dead letter is smaller than any request"
        self._too_large.add(record.id)
        self._log.warning(
            Event.DEAD_LETTER_SHORTENED,
            origin=str(record.origin),
            offset=record.offset,
            value_bytes=len(record.value or b""),
        )
        self._produce(dead_letter)

    def _await_acknowledgements(self) -> None:
        """Block until the brokers have accepted every dead letter; one that is too large, without its content.

        An idempotent producer that is refused one message as too large fails every other one with the same error.

        1. Wait for the answers.
        2. If any was "too large", ask for each again with a producer that is not idempotent.
        3. Send what is refused now without its content.
        """
        self._await_answers()  # 1.
        if self._is_idempotent and any(_is_too_large(answer) for _, answer in self._sent):
            self._reconnect(idempotent=False)  # 2.
            self._await_answers()
        answered, self._sent = self._sent, []
        for dead_letter, answer in answered:
            if _is_too_large(answer) and dead_letter.record.id not in self._too_large:
                self._shorten(dead_letter)  # 3.
            else:
                self._sent.append((dead_letter, answer))
        self._await_answers()
        for _, answer in self._sent:
            answer.get(timeout=0)

    def _await_answers(self) -> None:
        self._producer.flush(timeout=2 * self._settings.request_timeout_ms / 1000)

    def _reconnect(self, *, idempotent: bool = True) -> None:
        """Recover from a failure.

        1. Build new clients.
        2. Read the topic for the dead letters that arrived, and drop them from the backlog.
        3. Send the others again.
        """
        self._disconnect()
        self._sent.clear()
        if not is_reachable(self._settings):
            raise self._fail("written", KafkaError("no broker accepts a connection"))
        try:
            self._connect(_RECONNECT_S, idempotent=idempotent)  # 1.
        except SourceError as error:
            raise self._fail("written", error) from error
        self._backlog.drop(self.recall(self.mark()))  # 2.
        self._failed = False
        for dead_letter in self._backlog:  # 3.
            self._produce(dead_letter)

    def _end_offsets(self) -> dict[TopicPartition, int]:
        return end_offsets(self._reader, self._partitions)

    def _starts(self, mark: Mapping[str, Any] | None, ends: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """The offset to read each partition from: the mark, if the log still holds it."""
        begins = beginning_offsets(self._reader, self._partitions)
        marked = dict(mark["ends"]) if mark is not None and mark.get("topic") == self._topic else {}
        starts = {}
        for origin in self._partitions:
            begin, start = begins[origin], marked.get(origin.partition, 0)
            starts[origin] = start if begin <= start <= ends[origin] else begin
        return starts

    def _fail(self, what: str, error: Exception) -> DeadLetterError:
        """Note the failure and return the error to raise."""
        self._failed = True
        reason = str(error) if isinstance(error, SourceError) else describe(error)
        return DeadLetterError(f"dead letters cannot be {what}: topic {self._topic}: {reason}")


def _is_too_large(answer: Any) -> bool:
    return isinstance(answer.exception, _TOO_LARGE)


def read_topic(settings: KafkaSettings, topic: str) -> Iterator[DeadLetter]:
    """Yield the dead letters of a topic, oldest first per partition; other messages are left out.

    Raises:
        SourceError: no broker, wrong credentials, no such topic, or READ is not allowed on it.
        DeadLetterError: the topic cannot be read.
    """
    cluster = Cluster(settings)
    try:
        partitions = cluster.topics([topic], to=[ACLOperation.READ])[topic].origins
    finally:
        cluster.close()
    consumer = new_consumer(settings, _BOOTSTRAP_S, isolation_level="read_committed")
    try:
        starts, ends = beginning_offsets(consumer, partitions), end_offsets(consumer, partitions)
        messages = read_between(consumer, starts, ends, timeout_ms=settings.request_timeout_ms)
        yield from (dead_letter for message in messages if (dead_letter := _dead_letter(message)) is not None)
    except CLIENT_ERRORS as error:
        raise DeadLetterError(f"dead letters cannot be read: topic {topic}: {describe(error)}") from error
    finally:
        close_quietly(consumer)


def _dead_letter(message: Any) -> DeadLetter | None:
    errors = text_of(pair for pair in message.headers if pair[0].startswith(PREFIX))
    return from_headers(
        errors,
        value=None if _NO_VALUE in errors or LEFT_OUT_BYTES in errors else message.value,
        key=message.key,
        own=_own(message.headers),
        written_ms=message.timestamp,
    )


def _own(headers: Sequence[tuple[str, bytes | None]]) -> tuple[tuple[str, bytes | None], ...]:
    """The record's headers. It may have Kafka Connect's too: those after ours are not its own."""
    ours = next((index for index, (name, _) in enumerate(headers) if name.startswith(PREFIX)), len(headers))
    added = (PREFIX, _CONNECT_PREFIX)
    return (*headers[:ours], *(header for header in headers[ours:] if not header[0].startswith(added)))
