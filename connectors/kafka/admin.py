"""Administrative requests to the cluster: topics with their ids and permissions, and offset commits."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka.admin import ACLOperation
from kafka.errors import (
    KafkaError,
    NoError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from kafka.structs import OffsetAndMetadata

from connectors.kafka.clients import close_quietly, describe, is_reachable, new_admin, to_kafka
from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import Position, TopicPartition

_NO_ID = (str(None), str(UUID(int=0)))  # from brokers before Kafka 2.8


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it exists now. A topic deleted and created again has another id; old brokers have no ids ("")."""

    name: str
    id: str
    partitions: tuple[int, ...]

    @property
    def origins(self) -> tuple[TopicPartition, ...]:
        return tuple(TopicPartition(self.name, partition) for partition in self.partitions)


def identity_of(topics: Iterable[Topic]) -> dict[str, str]:
    """Return the id of each topic by name; topics without an id are omitted."""
    return {topic.name: topic.id for topic in topics if topic.id}


def check_identity(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check that every topic has the same id as before; topics without an id are not checked.

    Raises:
        OffsetGapError: a topic was deleted and created again.
    """
    for name, topic_id in before.items():
        if now.get(name, topic_id) != topic_id:
            raise OffsetGapError(
                f"topic {name} must have the same id as when it was read, {topic_id}, found {now[name]}: it was "
                "deleted and created again, and its old records are gone. Start over with --fresh to learn the new one"
            )


def topic_of(settings: KafkaSettings, name: str, entry: Mapping[str, Any], to: Sequence[ACLOperation]) -> Topic:
    """Return the topic that an entry of the cluster's metadata describes, if all operations in `to` are allowed.

    Raises:
        SourceError: the topic does not exist, or an operation is not allowed.
    """
    error = for_code(entry["error_code"])
    if error is TopicAuthorizationFailedError:
        wanted = [ACLOperation.DESCRIBE, *to]
        raise SourceError(
            f"topic {name} must be visible to this user, found no DESCRIBE permission. "
            f"{_acl_command(settings, name, wanted)}"
        )
    if error is not NoError:
        raise SourceError(
            f"topic {name} must exist at {settings.bootstrap_servers}, the broker returned {error.__name__}. "
            "Create it with kafka-topics.sh "
            f"--bootstrap-server {settings.bootstrap_servers} --create --topic {name} --partitions 1"
        )
    allowed = entry.get("authorized_operations")  # empty if the broker does not report them: then assume all
    missing = [operation for operation in to if allowed and operation.name not in allowed]
    if missing:
        names = " and ".join(operation.name for operation in missing)
        raise SourceError(
            f"topic {name} must allow {names} to this user, found no such permission. "
            f"{_acl_command(settings, name, missing)}"
        )
    partitions = sorted(partition["partition_index"] for partition in entry["partitions"])
    topic_id = str(entry.get("topic_id"))
    return Topic(name, "" if topic_id in _NO_ID else topic_id, tuple(partitions))


def _acl_command(settings: KafkaSettings, topic: str, operations: Iterable[ACLOperation]) -> str:
    """The command that grants the operations; the user is NAME unless the settings have one."""
    options = " ".join(f"--operation {operation.name}" for operation in operations)
    return (
        f"Allow it with kafka-acls.sh --bootstrap-server {settings.bootstrap_servers} --add --allow-principal "
        f"User:{settings.sasl_plain_username or 'NAME'} {options} --topic {topic}"
    )


_COORDINATOR_TIMEOUT_S = 2.0  # a cluster's first commit creates the offsets topic, which takes a second
_COORDINATOR_PAUSE_S = 0.2


class Cluster:
    """An admin client, built on first use and again after any failure, because its coordinator cache never expires."""

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

    def topics(self, names: Iterable[str], *, to: Sequence[ACLOperation] = ()) -> dict[str, Topic]:
        """Describe topics on which the operations `to` must be allowed.

        Raises:
            SourceError: a topic does not exist, an operation is not allowed, or the cluster does not answer.
        """
        names = list(names)
        found = self._describe(names)
        return {name: topic_of(self._settings, name, found.get(name, {"error_code": 3}), to) for name in names}

    def source_topics(self, *, to: Sequence[ACLOperation] = ()) -> dict[str, Topic]:
        """Describe the topics that are learned from; of a pattern those that match it now, perhaps none.

        Raises:
            SourceError: see `topics`.
        """
        if self._settings.topics_pattern is None:
            return self.topics(self._settings.topics, to=to)
        # a topic with an error is being created or deleted
        found = {name: entry for name, entry in self._describe(None).items() if entry["error_code"] == NoError.errno}
        return {
            name: topic_of(self._settings, name, found[name], to)
            for name in sorted(found)
            if self._settings.reads(name)
        }

    def commit(self, group: str, position: Position, note: str) -> None:
        """Store `position` as the group's offsets, with `note` as their metadata; blocks a few seconds at most.

        Raises:
            SourceError: the cluster refuses the commit or does not answer.
        """
        offsets = {to_kafka(origin): OffsetAndMetadata(offset, note, -1) for origin, offset in position.items()}
        deadline = self._clock() + _COORDINATOR_TIMEOUT_S
        while error := self._try_commit(group, offsets):
            self.close()
            if not error.retriable or self._clock() > deadline:
                raise SourceError(
                    f"offsets of group {group} could not be committed: {describe(error)}. Use a group.id that no "
                    "other consumer uses, and grant the user READ on the group"
                )
            self._sleep(_COORDINATOR_PAUSE_S)

    def close(self) -> None:
        if self._admin is not None:
            close_quietly(self._admin)
            self._admin = None

    def _describe(self, names: list[str] | None) -> dict[str, Mapping[str, Any]]:
        """The metadata of these topics, or of all that this user may see, by name."""
        try:
            return {entry["name"]: entry for entry in self._client().describe_topics(names)}
        except KafkaError as error:
            self.close()
            raise SourceError(
                f"{self._settings.bootstrap_servers} did not answer a request for its topics: {error}"
            ) from error

    def _try_commit(self, group: str, offsets: dict[Any, Any]) -> Any:
        """Commit once; return the error, or None."""
        try:
            answers = self._client().alter_group_offsets(group, offsets)
        except KafkaError as error:
            return error
        gone = (NoError, UnknownTopicOrPartitionError)  # a deleted topic has no offsets, and the others are stored
        return next((answer() for answer in answers.values() if answer not in gone), None)

    def _client(self) -> Any:
        if self._admin is None:
            if not is_reachable(self._settings):
                raise SourceError(
                    f"a Kafka broker must be reachable at {self._settings.bootstrap_servers}, none accepts a "
                    "connection. Start the broker, or correct bootstrap.servers"
                )
            self._admin = new_admin(self._settings, self._bootstrap_s)
        return self._admin
