"""A dead-letter topic in memory, in place of the clients of `KafkaDeadLetters`, with failures on demand."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import KafkaError, KafkaTimeoutError

from connectors.dead_letter_headers import record_of
from streamlearn.stream.record import RecordId, TopicPartition

PARTITION = TopicPartition("dead", 0)


class FakeCluster:
    """One topic of one partition; also the consumer and the producer that read and write it."""

    def __init__(self) -> None:
        self.log: list[Sequence[tuple[str, bytes]]] = []
        """The headers of each message."""
        self.open_clients = 0
        self.acknowledges = True
        self.is_readable = True
        self.tells_offsets = True

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of every client."""
        replaced = {
            "Cluster": lambda _: SimpleNamespace(
                topics=lambda *_, **__: {"dead": SimpleNamespace(origins=(PARTITION,))}, close=lambda: None
            ),
            "new_consumer": self._open,
            "new_producer": self._open,
            "close_quietly": self._close,
            "is_reachable": lambda _: True,
            "wait_until_reachable": lambda *_, **__: None,
            "end_offsets": self.end_offsets,
            "beginning_offsets": lambda *_: {PARTITION: 0},
            "read_between": self.read_between,
        }
        for name, value in replaced.items():
            patch.setattr(f"connectors.kafka.dead_letters.{name}", value)

    @property
    def records(self) -> list[RecordId | None]:
        """The record of each message."""
        return [record_of(headers) for headers in self.log]

    # --- the clients --------------------------------------------------------------------------------------------------

    def send(self, _topic: str, _value: bytes, *, key: bytes | None, headers: list[tuple[str, bytes]]) -> Any:
        """Store a message; whether it is acknowledged is decided now."""
        assert key is None
        self.log.append(headers)
        error = None if self.acknowledges else KafkaError("no acknowledgement")

        def get(timeout: float) -> None:
            assert timeout == 0
            if error is not None:
                raise error

        return SimpleNamespace(exception=error, get=get)

    def flush(self, timeout: float) -> None:
        """Nothing waits."""

    def end_offsets(self, *_: Any) -> dict[TopicPartition, int]:
        """The end of the topic."""
        if not self.tells_offsets:
            raise KafkaTimeoutError("Failed to get offsets by timestamps in 30000 ms")
        return {PARTITION: len(self.log)}

    def read_between(
        self, _: Any, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], *, timeout_ms: int
    ) -> Iterator[Any]:
        """The messages from one offset to another."""
        if not self.is_readable:
            raise KafkaError(f"no message for {timeout_ms} ms before the end of the topic")
        yield from (SimpleNamespace(headers=headers) for headers in self.log[starts[PARTITION] : ends[PARTITION]])

    def close(self) -> None:
        """Nothing is open."""

    def _open(self, *_: Any, **__: Any) -> Any:
        self.open_clients += 1
        return self

    def _close(self, _: Any) -> None:
        self.open_clients -= 1
