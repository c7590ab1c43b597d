"""What a broker says of a topic, held against what must be so: it exists, is the one that it was, and is open to us."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka.admin import ACLOperation
from kafka.errors import NoError, TopicAuthorizationFailedError, for_code

from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import TopicPartition

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


def topic_of(settings: KafkaSettings, name: str, entry: Mapping[str, Any], to: Sequence[ACLOperation]) -> Topic:
    """The topic that an entry of the cluster's metadata describes, when all of `to` may be done with it.

    Raises:
        SourceError: it does not exist, or is closed to us.
    """
    error = for_code(entry["error_code"])
    if error is TopicAuthorizationFailedError:
        wanted = [ACLOperation.DESCRIBE, *to]
        raise SourceError(
            f"topic {name} must be open to this user, the broker does not show it. {_grant(settings, name, wanted)}"
        )
    if error is not NoError:
        raise SourceError(
            f"topic {name} must exist at {settings.bootstrap_servers}, the broker says {error.__name__}. "
            "Create it with kafka-topics.sh "
            f"--bootstrap-server {settings.bootstrap_servers} --create --topic {name} --partitions 1"
        )
    allowed = entry.get("authorized_operations")  # empty where the broker does not tell, for it has shown the topic
    missing = [operation for operation in to if allowed and operation.name not in allowed]
    if missing:
        names = " and ".join(operation.name for operation in missing)
        raise SourceError(f"topic {name} must be open to this user for {names}. {_grant(settings, name, missing)}")
    partitions = sorted(partition["partition_index"] for partition in entry["partitions"])
    topic_id = str(entry.get("topic_id"))
    return Topic(name, "" if topic_id in _NO_ID else topic_id, tuple(partitions))


def _grant(settings: KafkaSettings, topic: str, operations: Iterable[ACLOperation]) -> str:
    """What an operator types, where this client knows its user's name."""
    options = " ".join(f"--operation {operation.name}" for operation in operations)
    return (
        f"Allow it with kafka-acls.sh --bootstrap-server {settings.bootstrap_servers} --add --allow-principal "
        f"User:{settings.sasl_plain_username or 'NAME'} {options} --topic {topic}"
    )
