"""Settings, a clock and clients for tests of Kafka code without a broker."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import KafkaError, KafkaTimeoutError

from connectors.dead_letters import record_of
from connectors.kafka.admin import Topic
from connectors.kafka.clients import to_kafka
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import RecordId, TopicPartition


def settings(**overrides: object) -> KafkaSettings:
    values = {"bootstrap_servers": "127.0.0.1:9", "security_protocol": "PLAINTEXT", "topics": ("a",), **overrides}
    return KafkaSettings.model_validate(values)


class HeaderName(str):
    """A header name as the bytes that another client sends."""

    def __new__(cls, content: bytes) -> "HeaderName":
        name = super().__new__(cls, content.decode("latin-1"))
        name.content = content
        return name

    content: bytes

    def encode(self, *_: Any, **__: Any) -> bytes:
        return self.content


class SteppingClock:
    """A clock that only `sleep` advances; it calls `on_sleep` each time."""

    def __init__(self, on_sleep: Callable[[], object] = lambda: None) -> None:
        self._on_sleep = on_sleep
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        self._on_sleep()


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
        return [record_of(headers) for headers in self.log]

    # --- the clients --------------------------------------------------------------------------------------------------

    def send(self, _topic: str, _value: bytes, *, key: bytes | None, headers: list[tuple[str, bytes]]) -> Any:
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
        if not self.tells_offsets:
            raise KafkaTimeoutError("Failed to get offsets by timestamps in 30000 ms")
        return {PARTITION: len(self.log)}

    def read_between(
        self, _: Any, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], *, timeout_ms: int
    ) -> Iterator[Any]:
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


class FakeConsumer:
    """Logs of offsets; a request for those of partitions without a leader fails as kafka-python's does."""

    def __init__(self, logs: Mapping[TopicPartition, tuple[int, int]]) -> None:
        self.logs = dict(logs)
        """First and next offset of each partition."""
        self.leaderless: set[TopicPartition] = set()
        self.positions: dict[Any, int] = {}

    def install(self, patch: pytest.MonkeyPatch, module: str) -> None:
        """Take the place of the clients that a module of connectors/kafka builds, but for the producer."""
        replaced = {
            "Cluster": self._open,
            "new_consumer": self._open,
            "is_reachable": lambda _: True,
            "wait_until_reachable": lambda *_, **__: None,
        }
        for name, value in replaced.items():
            patch.setattr(f"connectors.kafka.{module}.{name}", value)

    def beginning_offsets(self, partitions: Sequence[Any], timeout_ms: int | None = None) -> dict[Any, int]:
        return self._offsets(partitions, timeout_ms, 0)

    def end_offsets(self, partitions: Sequence[Any], timeout_ms: int | None = None) -> dict[Any, int]:
        return self._offsets(partitions, timeout_ms, 1)

    def assign(self, partitions: Iterable[Any]) -> None:
        self.positions = dict.fromkeys(partitions, -1)

    def seek(self, partition: Any, offset: int) -> None:
        self.positions[partition] = offset

    def position(self, partition: Any, timeout_ms: int | None = None) -> int:
        assert timeout_ms is not None
        return self.positions[partition]

    def poll(self, *, timeout_ms: int, max_records: int) -> dict[Any, Any]:
        assert timeout_ms >= 0
        assert max_records > 0
        return {}

    def topics(self, names: Iterable[str], **_: Any) -> dict[str, Topic]:
        numbers = {name: tuple(each.partition for each in sorted(self.logs) if each.topic == name) for name in names}
        return {name: Topic(name, f"id of {name}", partitions) for name, partitions in numbers.items()}

    def source_topics(self, **_: Any) -> dict[str, Topic]:
        return self.topics(sorted({origin.topic for origin in self.logs}))

    def close(self) -> None:
        """Nothing is open."""

    def _open(self, *_: Any, **__: Any) -> Any:
        return self

    def _offsets(self, partitions: Sequence[Any], timeout_ms: int | None, which: int) -> dict[Any, int]:
        origins = [TopicPartition(*partition) for partition in partitions]
        led = [origin for origin in origins if origin not in self.leaderless]
        if origins and not led:
            raise KafkaTimeoutError(f"Failed to get offsets by timestamps in {timeout_ms} ms")
        for origin in origins:
            if origin not in led:
                raise KeyError(to_kafka(origin))
        return {to_kafka(origin): self.logs[origin][which] for origin in origins}
