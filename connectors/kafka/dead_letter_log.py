"""A dead-letter topic, read from its beginning to its present end."""

from collections.abc import Iterator
from typing import Any

from kafka.admin import ACLOperation

from connectors.dead_letter_headers import LEFT_OUT_BYTES, PREFIX, text_of
from connectors.kafka.clients import CLIENT_ERRORS, close_quietly, describe, new_consumer
from connectors.kafka.cluster import Cluster
from connectors.kafka.dead_letter_message import NO_VALUE
from connectors.kafka.topic_reader import beginning_offsets, end_offsets, read_between
from connectors.stored_dead_letter import DeadLetterId, StoredDeadLetter, from_headers
from streamlearn.errors import DeadLetterError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import TopicPartition

REPLAY_OF = "__streamlearn.replay.of"
"""Header of a record that was put back: the dead letter's identity. In the dead-letter topic, a message that has it and
is no dead letter says that this one was put back."""

_BOOTSTRAP_S = 30.0


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
