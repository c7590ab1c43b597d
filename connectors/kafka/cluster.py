"""Administrative requests to the cluster: topic descriptions and offset commits."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kafka.admin import ACLOperation
from kafka.errors import KafkaError, NoError
from kafka.structs import OffsetAndMetadata

from connectors.kafka.clients import close_quietly, describe, is_reachable, new_admin, to_kafka
from connectors.kafka.topics import Topic, topic_of
from streamlearn.errors import SourceError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import Position

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
        try:
            found = {entry["name"]: entry for entry in self._client().describe_topics(list(names))}
        except KafkaError as error:
            self.close()
            raise SourceError(
                f"{self._settings.bootstrap_servers} did not answer a request for its topics: {error}"
            ) from error
        return {name: topic_of(self._settings, name, found.get(name, {"error_code": 3}), to) for name in names}

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
        """Release the client. Safe to call twice."""
        if self._admin is not None:
            close_quietly(self._admin)
            self._admin = None

    def _try_commit(self, group: str, offsets: dict[Any, Any]) -> Any:
        """Commit once; return the error, or None."""
        try:
            answers = self._client().alter_group_offsets(group, offsets)
        except KafkaError as error:
            return error
        return next((answer() for answer in answers.values() if answer is not NoError), None)

    def _client(self) -> Any:
        if self._admin is None:
            if not is_reachable(self._settings):
                raise SourceError(
                    f"a Kafka broker must be reachable at {self._settings.bootstrap_servers}, none accepts a "
                    "connection. Start the broker, or correct bootstrap.servers"
                )
            self._admin = new_admin(self._settings, self._bootstrap_s)
        return self._admin
