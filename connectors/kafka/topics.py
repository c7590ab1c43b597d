"""Checks of a topic's description: it exists, is the same topic as before, and allows the operations we need."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka.admin import ACLOperation
from kafka.errors import NoError, TopicAuthorizationFailedError, for_code

from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import TopicPartition

_NO_ID = (str(None), str(UUID(int=0)))  # from brokers before Kafka 2.8


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it exists now. A topic deleted and created again has another id; old brokers have no ids ("")."""

    name: str
    id: str
    partitions: tuple[int, ...]

    @property
    def origins(self) -> tuple[TopicPartition, ...]:
        """Its partitions, in order."""
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
