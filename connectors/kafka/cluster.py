"""What the cluster says about topics, and what it is told about progress: everything that is not reading records."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka.errors import KafkaError, NoError, for_code
from kafka.structs import OffsetAndMetadata

from connectors.kafka.client import close_quietly, create_topic_command, describe, is_reachable, new_admin, to_kafka
from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import Position, TopicPartition

_COORDINATOR_PATIENCE_S = 2.0  # a cluster's first commit creates the offsets topic, which takes a second
_COORDINATOR_PAUSE_S = 0.2
_NO_ID = (str(None), str(UUID(int=0)))  # what brokers before Kafka 2.8 say


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it exists now. A topic deleted and created again has another id; it is empty where there are none."""

    name: str
    id: str
    partitions: tuple[int, ...]

    @property
    def origins(self) -> tuple[TopicPartition, ...]:
        """Its partitions, in order."""
        return tuple(TopicPartition(self.name, partition) for partition in self.partitions)


def identity_of(topics: Iterable[Topic]) -> dict[str, str]:
    """Name to id, of topics that have one."""
    return {topic.name: topic.id for topic in topics if topic.id}


def check_identity(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Every topic must be the one that it was; where an id is not known, nothing is said.

    Raises:
        OffsetGapError: one was deleted and created again.
    """
    for name, topic_id in before.items():
        if now.get(name, topic_id) != topic_id:
            raise OffsetGapError(
                f"topic {name} must have the id {topic_id} that it had when it was read, found {now[name]}: it was "
                "deleted and created again, and what it held before is gone. Start with --fresh to learn the new one"
            )


class Cluster:
    """An admin client that is built on first use and anew after any failure (its coordinator cache never ages)."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        bootstrap_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._bootstrap_s = bootstrap_s
        self._clock = clock
        self._sleep = sleep
        self._admin: Any = None

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Describe topics.

        Raises:
            SourceError: one does not exist, the user may not see it, or the cluster does not answer.
        """
        try:
            found = {entry["name"]: entry for entry in self._client().describe_topics(list(names))}
        except KafkaError as error:
            self.close()
            raise SourceError(f"{self._settings.bootstrap_servers} does not describe its topics: {error}") from error
        return {name: self._topic(name, found.get(name, {"error_code": 3})) for name in names}

    def commit(self, group: str, position: Position, note: str) -> None:
        """Store `position` as the group's offsets, with `note` as their metadata; blocks a few seconds at most.

        Raises:
            SourceError: the cluster refuses or does not answer.
        """
        offsets = {to_kafka(origin): OffsetAndMetadata(offset, note, -1) for origin, offset in position.items()}
        deadline = self._clock() + _COORDINATOR_PATIENCE_S
        while refusal := self._try_commit(group, offsets):
            self.close()
            if not refusal.retriable or self._clock() > deadline:
                raise SourceError(
                    f"group {group} must be this daemon's own and writable (READ on it): {describe(refusal)}"
                )
            self._sleep(_COORDINATOR_PAUSE_S)

    def close(self) -> None:
        """Release the client. Safe to call twice."""
        if self._admin is not None:
            close_quietly(self._admin)
            self._admin = None

    def _try_commit(self, group: str, offsets: dict[Any, Any]) -> Any:
        """Commit once; the error, or None."""
        try:
            answers = self._client().alter_group_offsets(group, offsets)
        except KafkaError as error:
            return error
        return next((answer() for answer in answers.values() if answer is not NoError), None)

    def _client(self) -> Any:
        if self._admin is None:
            if not is_reachable(self._settings):
                raise SourceError(
                    f"a Kafka broker must answer at {self._settings.bootstrap_servers}; none accepts a connection. "
                    "Start the broker, or correct bootstrap.servers"
                )
            self._admin = new_admin(self._settings, self._bootstrap_s)
        return self._admin

    def _topic(self, name: str, entry: dict[str, Any]) -> Topic:
        error = for_code(entry["error_code"])
        if error is not NoError:
            raise SourceError(
                f"topic {name} must exist at {self._settings.bootstrap_servers}, the broker says {error.__name__}. "
                f"Create it with {create_topic_command(self._settings, name)} or grant DESCRIBE on it"
            )
        partitions = sorted(partition["partition_index"] for partition in entry["partitions"])
        topic_id = str(entry.get("topic_id"))
        return Topic(name, "" if topic_id in _NO_ID else topic_id, tuple(partitions))
