"""Dead letters in a Kafka topic: key and value unchanged, the reason in headers like Kafka Connect's.

A record may be larger than the dead-letter topic allows: the limits of two topics differ, and a compressed record has
its full size here. Such a dead letter is written without the record's key, value and headers, but with its place and
size.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from kafka.admin import ACLOperation
from kafka.errors import KafkaError, LeaderNotAvailableError, MessageSizeTooLargeError, RecordListTooLargeError

from connectors.dead_letters import (
    LEFT_OUT_BYTES,
    PREFIX,
    DeadLetterBacklog,
    DeadLetterId,
    StoredDeadLetter,
    from_headers,
    headers_of,
    own_headers,
    record_of,
    text_of,
)
from connectors.kafka.admin import Cluster
from connectors.kafka.clients import (
    CLIENT_ERRORS,
    close_quietly,
    describe,
    is_reachable,
    new_consumer,
    new_producer,
    to_kafka,
    wait_until_reachable,
)
from streamlearn.errors import CredentialsError, DeadLetterError, SourceError
from streamlearn.events import Event, get_logger
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import RecordId, TopicPartition
from streamlearn.stream.source import DeadLetter

NO_VALUE = PREFIX + "value.absent"
"""Marks a record without key and value. kafka-python cannot send such a message, so its value is empty."""
_MAX_CHARACTERS = 200
"""Of the reason's text in a shortened dead letter, which then has less than 2 kB."""


class DeadLetterMessage(NamedTuple):
    """What is sent."""

    value: bytes | None
    key: bytes | None
    headers: list[tuple[str, bytes]]


def message_of(dead_letter: DeadLetter) -> DeadLetterMessage:
    """The record's key, value and headers, and the reason."""
    record = dead_letter.record
    headers = own_headers(record) + _reason(dead_letter)
    if record.value is None and record.key is None:
        return DeadLetterMessage(b"", None, [*headers, (NO_VALUE, b"true")])
    return DeadLetterMessage(record.value, record.key, headers)


def shortened_message_of(dead_letter: DeadLetter) -> DeadLetterMessage:
    """The reason, where the record was read, and the size of its value; any topic accepts that."""
    size = len(dead_letter.record.value or b"")
    headers = _reason(replace(dead_letter, message=dead_letter.message[:_MAX_CHARACTERS]))
    return DeadLetterMessage(b"", None, [*headers, (LEFT_OUT_BYTES, b"%d" % size)])


def _reason(dead_letter: DeadLetter) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in headers_of(dead_letter).items()]


# Where the logs of partitions begin and end, and reading from some offsets to others, with a consumer at hand.
#
# kafka-python waits for a leader if none of the requested partitions has one. If some have, it raises a bare KeyError.


_POLL_MS = 500


def end_offsets(consumer: Any, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The offset after the last message of each partition; of the last committed one with `read_committed`.

    Raises:
        KafkaError: a partition has no leader, or the cluster does not answer.
    """
    origins = list(partitions)
    return _complete(available_end_offsets(consumer, origins), origins)


def beginning_offsets(consumer: Any, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The offset of the first message that each partition still holds. Raises what `end_offsets` raises."""
    origins = list(partitions)
    return _complete(available_beginning_offsets(consumer, origins), origins)


def available_end_offsets(
    consumer: Any, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
) -> dict[TopicPartition, int]:
    """`end_offsets` of the partitions that have a leader; by default the timeout is `request_timeout_ms`.

    Raises:
        KafkaError: no partition has a leader, or the cluster does not answer.
    """
    return _available(consumer.end_offsets, partitions, timeout_ms)


def available_beginning_offsets(
    consumer: Any, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
) -> dict[TopicPartition, int]:
    """`beginning_offsets` of the partitions that have a leader. Raises what `available_end_offsets` raises."""
    return _available(consumer.beginning_offsets, partitions, timeout_ms)


def read_between(
    consumer: Any, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], *, timeout_ms: int
) -> Iterator[Any]:
    """Yield every message from `starts` to `ends`, in order per partition.

    Raises:
        KafkaError: nothing came for `timeout_ms`.
    """
    unread = {to_kafka(origin): ends[origin] for origin, start in starts.items() if start < ends[origin]}
    consumer.assign(list(unread))
    for partition in unread:
        consumer.seek(partition, starts[TopicPartition(*partition)])
    remaining_ms = timeout_ms
    while unread:
        messages = consumer.poll(timeout_ms=_POLL_MS)
        for partition, batch in messages.items():
            yield from (message for message in batch if message.offset < ends[TopicPartition(*partition)])
        remaining_ms = timeout_ms if messages else remaining_ms - _POLL_MS
        if remaining_ms <= 0:
            raise KafkaError(f"no message for {timeout_ms} ms before the end of the topic")
        unread = {partition: end for partition, end in unread.items() if consumer.position(partition) < end}


def _available(
    request: Callable[..., Mapping[Any, int]], partitions: Iterable[TopicPartition], timeout_ms: int | None
) -> dict[TopicPartition, int]:
    """Ask again without a partition that has no leader, until there is none of them."""
    asked = [to_kafka(origin) for origin in partitions]
    while True:
        try:
            offsets = request(asked, timeout_ms=timeout_ms)
        except KeyError as error:
            asked.remove(error.args[0])
        else:
            return {TopicPartition(*partition): offset for partition, offset in offsets.items()}


def _complete(offsets: dict[TopicPartition, int], partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Return `offsets` if they have all partitions.

    Raises:
        LeaderNotAvailableError: they do not.
    """
    missing = [str(origin) for origin in partitions if origin not in offsets]
    if missing:
        raise LeaderNotAvailableError(
            f"every partition must have a leader, {', '.join(missing)} has none. Start a broker that holds a replica"
        )
    return offsets


_BOOTSTRAP_S = 30.0
_RECONNECT_S = 10.0
"""Timeout of a reconnection, during which training waits."""
_OPERATIONS = (ACLOperation.READ, ACLOperation.WRITE)  # READ: after an outage the topic is read for what arrived
_MAX_UNACKNOWLEDGED = 1_000
"""Number of unacknowledged dead letters that triggers a `flush`."""
_MAX_REQUEST_BYTES = 64 << 20  # the topic's own max.message.bytes decides, not the client
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
            self._wait_for_broker(start_timeout_s, clock, sleep)
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
            found = [record_of(message.headers) for message in self._read(self._starts(mark, ends), ends)]
        except CLIENT_ERRORS as error:
            raise self._fail("read", error) from error
        self._ends = ends  # only now: a reading that failed begins again at the old ends
        return frozenset(record for record in found if record is not None)

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

    def _wait_for_broker(self, timeout_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """Block until a broker accepts connections; log once that none does.

        Raises:
            SourceError: none accepted a connection within `timeout_s`.
        """
        wait_until_reachable(
            self._settings,
            timeout_s,
            on_wait=lambda: self._log.warning(
                Event.SOURCE_UNREACHABLE,
                servers=self._settings.bootstrap_servers,
                reason="no broker accepts a connection",
            ),
            clock=clock,
            sleep=sleep,
        )

    def _connect(self, bootstrap_s: float, *, idempotent: bool = True) -> None:
        """Build the clients. A producer that is not idempotent never repeats a request: that could write it twice."""
        once = {} if idempotent else {"enable_idempotence": False, "retries": 0}
        self._is_idempotent = idempotent
        self._reader = new_consumer(self._settings, bootstrap_s, isolation_level="read_uncommitted")
        self._producer = new_producer(self._settings, bootstrap_s, max_request_size=_MAX_REQUEST_BYTES, **once)

    def _disconnect(self) -> None:
        clients, self._reader, self._producer = (self._reader, self._producer), None, None
        for client in clients:
            if client is not None:
                close_quietly(client)

    def _produce(self, dead_letter: DeadLetter) -> None:
        shortened = dead_letter.record.id in self._too_large
        value, key, headers = (shortened_message_of if shortened else message_of)(dead_letter)
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

        Raises:
            KafkaError: one was not accepted.
            DeadLetterError: the cluster does not answer any more.
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

        Raises:
            DeadLetterError: the cluster does not answer yet.
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

    def _read(self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> Iterator[Any]:
        """Every message from `starts` to `ends`."""
        return read_between(self._reader, starts, ends, timeout_ms=self._settings.request_timeout_ms)

    def _fail(self, what: str, error: Exception) -> DeadLetterError:
        """Note the failure and return the error to raise."""
        self._failed = True
        reason = str(error) if isinstance(error, SourceError) else describe(error)
        return DeadLetterError(f"dead letters cannot be {what}: topic {self._topic}: {reason}")


def _is_too_large(answer: Any) -> bool:
    return isinstance(answer.exception, _TOO_LARGE)


REPLAY_OF = "__streamlearn.replay.of"
"""Header of a record that was put back: the dead letter's identity. In the dead-letter topic, a message that has it and
is no dead letter says that this one was put back."""


class KafkaDeadLetterLog:
    """Dead letters and the marks of those that were put back; messages of open transactions are not read."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        """Connect.

        Raises:
            SourceError: no broker, wrong credentials, no such topic, or READ is not allowed on it.
        """
        self._settings = settings
        self._topic = topic
        self.partitions = partitions_of(settings, [topic], ACLOperation.READ)
        self._consumer = new_consumer(settings, _BOOTSTRAP_S, isolation_level="read_committed")

    def read(self) -> Iterator[StoredDeadLetter]:
        """Yield the dead letters, oldest first per partition.

        Raises:
            DeadLetterError: the topic cannot be read.
        """
        for message in self._messages():
            found = _dead_letter(message)
            if found is not None:
                yield found

    def replayed(self) -> frozenset[DeadLetterId]:
        """The dead letters that were put back. Raises what `read` raises."""
        marks = (message for message in self._messages() if not _has_errors(message))
        return frozenset(each for each in map(replay_of, marks) if each is not None)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        close_quietly(self._consumer)

    def _messages(self) -> Iterator[Any]:
        timeout_ms = self._settings.request_timeout_ms
        try:
            starts = beginning_offsets(self._consumer, self.partitions)
            ends = end_offsets(self._consumer, self.partitions)
            yield from read_between(self._consumer, starts, ends, timeout_ms=timeout_ms)
        except CLIENT_ERRORS as error:
            raise DeadLetterError(f"dead letters cannot be read: topic {self._topic}: {describe(error)}") from error


def partitions_of(settings: KafkaSettings, topics: list[str], *operations: ACLOperation) -> tuple[TopicPartition, ...]:
    """Return the partitions of topics on which the operations are allowed.

    Raises:
        SourceError: a topic does not exist, an operation is not allowed, or the cluster does not answer.
    """
    cluster = Cluster(settings)
    try:
        return tuple(origin for topic in cluster.topics(topics, to=operations).values() for origin in topic.origins)
    finally:
        cluster.close()


def replay_of(message: Any) -> DeadLetterId | None:
    """The dead letter that a message was put back for; None if it has no such header."""
    values = [value for name, value in message.headers if name == REPLAY_OF and value is not None]
    try:
        return DeadLetterId.parse(values[-1].decode())
    except (IndexError, ValueError):
        return None


def _dead_letter(message: Any) -> StoredDeadLetter | None:
    errors = text_of(pair for pair in message.headers if pair[0].startswith(PREFIX))
    return from_headers(
        errors,
        value=None if NO_VALUE in errors or LEFT_OUT_BYTES in errors else message.value,
        key=message.key,
        own=tuple((name, value or b"") for name, value in message.headers if not name.startswith(PREFIX)),
        written_ms=message.timestamp,
        sink_partition=message.partition,
    )


def _has_errors(message: Any) -> bool:
    return any(name.startswith(PREFIX) for name, _ in message.headers)
