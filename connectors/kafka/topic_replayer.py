"""Putting dead letters back into their topics, in Kafka transactions.

With a dead-letter topic, a transaction holds the records and, for each, a mark in the partition of its dead letter: a
reader of committed messages finds both or neither, wherever a process is killed.

1. `init_transactions` aborts what a killed process left open, and fences off one that still runs.
2. The marks are read: what was put back by then was committed.
3. One transaction for each portion of dead letters.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kafka.admin import ACLOperation
from kafka.errors import ProducerFencedError

from connectors.dead_letters import DeadLetterId, Repair
from connectors.kafka.clients import CLIENT_ERRORS, close_quietly, describe, new_consumer, new_producer
from connectors.kafka.dead_letters import (
    REPLAY_OF,
    KafkaDeadLetterLog,
    beginning_offsets,
    end_offsets,
    partitions_of,
    read_between,
    replay_of,
)
from streamlearn.errors import DeadLetterError, SourceError, UsageError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import TopicPartition

_BOOTSTRAP_S = 30.0
_TRANSACTION_TIMEOUT_MS = 30_000
"""A daemon waits this long for the records after a transaction whose process was killed."""
_MAX_REQUEST_BYTES = 64 << 20  # the topic's own max.message.bytes decides, not the client


class KafkaTarget:
    """The topics that dead letters came from. A put is one transaction."""

    def __init__(self, settings: KafkaSettings, name: str, marks: str | None = None) -> None:
        """Connect, abort what an earlier process left open, and fence it off.

        Args:
            settings: The cluster.
            name: Of what is replayed; two processes that replay the same have the same.
            marks: Dead-letter topic that gets a mark for each record.

        Raises:
            UsageError: the source reads what transactions did not commit.
            SourceError: no broker, wrong credentials, or transactions are not allowed.
        """
        if settings.isolation_level != "read_committed":
            raise UsageError(
                "dead letters are put back in transactions, but source.kafka.isolation.level is read_uncommitted: the "
                "daemon would read those that were aborted. Set read_committed"
            )
        self._settings = settings
        self._marks = marks
        self._partitions = frozenset(partitions_of(settings, list(settings.topics), ACLOperation.WRITE))
        self._id = f"streamlearn-replay-{name}"
        self._producer = new_producer(
            settings,
            _BOOTSTRAP_S,
            transactional_id=self._id,
            transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS,
            max_request_size=_MAX_REQUEST_BYTES,
        )
        try:
            self._producer.init_transactions()  # 1.
        except CLIENT_ERRORS as error:
            self.close()
            raise SourceError(
                f"transactions must be allowed to this user: {describe(error)}. Grant WRITE and DESCRIBE on the "
                f"transactional id {self._id}"
            ) from error

    def plan(self, repairs: Sequence[Repair]) -> dict[str, Any]:
        """The ids, and where the topics end now; see `ReplayTarget`."""
        with self._reader() as consumer:
            ends = end_offsets(consumer, self._partitions)
        return {
            "ids": [str(repair.dead_letter.id) for repair in repairs],
            "ends": [[*_pair(origin), end] for origin, end in ends.items()],
        }

    def put(self, repairs: Sequence[Repair]) -> None:
        """Produce the records and their marks in one transaction; see `ReplayTarget`."""
        try:
            self._producer.begin_transaction()
            for repair in repairs:
                self._send(repair)
            self._producer.flush()
            self._producer.commit_transaction()
        except ProducerFencedError as error:
            raise DeadLetterError(
                "another replay has begun and took over: nothing of this portion was put back"
            ) from error
        except CLIENT_ERRORS as error:
            with contextlib.suppress(*CLIENT_ERRORS):
                self._producer.abort_transaction()
            raise DeadLetterError(
                f"dead letters could not be put back: {describe(error)}. Replay again: what was put back is known"
            ) from error

    def arrived(self, plan: dict[str, Any]) -> bool:
        """Whether the topics hold the records after their ends then; see `ReplayTarget`."""
        wanted = set(map(DeadLetterId.parse, plan["ids"]))
        starts = {TopicPartition(topic, number): end for topic, number, end in plan["ends"]}
        with self._reader() as consumer:
            begins = beginning_offsets(consumer, starts)
            gone = [str(origin) for origin, start in starts.items() if begins[origin] > start]
            if gone:
                raise DeadLetterError(
                    f"a replay was killed, and retention has deleted what followed it in {', '.join(gone)}: whether it "
                    'was committed cannot be known. Add a line {"arrived":true} or false to the ledger'
                )
            ends = end_offsets(consumer, starts)
            messages = read_between(consumer, starts, ends, timeout_ms=self._settings.request_timeout_ms)
            return bool(wanted & {replay_of(message) for message in messages})

    def close(self) -> None:
        """Close the producer. Safe to call twice."""
        close_quietly(self._producer)

    def _send(self, repair: Repair) -> None:
        dead_letter, value = repair
        record, mark = dead_letter.record, (REPLAY_OF, str(dead_letter.id).encode())
        headers = [header for header in record.headers if header[0] != REPLAY_OF]
        partition = record.origin.partition if record.origin in self._partitions else None
        self._producer.send(record.origin.topic, value, key=record.key, headers=[*headers, mark], partition=partition)
        if self._marks is not None:
            self._producer.send(self._marks, b"", headers=[mark], partition=dead_letter.sink_partition)

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Any]:
        """A consumer for one block, whose errors are translated there."""
        consumer = new_consumer(self._settings, _BOOTSTRAP_S, isolation_level="read_committed")
        try:
            yield consumer
        except CLIENT_ERRORS as error:
            raise DeadLetterError(f"the topics cannot be read: {describe(error)}") from error
        finally:
            close_quietly(consumer)


class TopicReplayer:
    """Puts back what is in a dead-letter topic; the marks are in the same topic."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        """Connect. Raises what `KafkaTarget` raises."""
        partitions_of(settings, [topic], ACLOperation.READ, ACLOperation.WRITE)
        self._target = KafkaTarget(settings, topic, marks=topic)  # 1.
        log = KafkaDeadLetterLog(settings, topic)
        try:
            self._replayed = log.replayed()  # 2.
        finally:
            log.close()

    def replayed(self) -> frozenset[DeadLetterId]:
        """Those that have a mark."""
        return self._replayed

    def put_back(self, repairs: Sequence[Repair]) -> None:
        """Put back all or none, durably; see `Replayer`."""
        self._target.put(repairs)  # 3.
        self._replayed |= {repair.dead_letter.id for repair in repairs}

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._target.close()


def _pair(origin: TopicPartition) -> tuple[str, int]:
    return origin.topic, origin.partition
