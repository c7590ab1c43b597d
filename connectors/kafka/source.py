"""Kafka topics as a source: every partition assigned, never subscribed, positions kept here and nowhere else.

kafka-python's consumer is disposable. After any error that its own retries do not cover, the next `poll` of the same
object may spin without end, so it is closed and a new one goes on from the offsets kept here.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kafka.admin import ACLOperation
from kafka.errors import AuthorizationError, KafkaError, LogTruncationError

from connectors.kafka.clients import (
    CLIENT_ERRORS,
    close_quietly,
    describe,
    is_reachable,
    new_consumer,
    to_kafka,
    wait_until_reachable,
)
from connectors.kafka.cluster import Cluster
from connectors.kafka.offsets import going_on, starting_offsets
from connectors.kafka.partition_monitor import PartitionMonitor
from connectors.kafka.topics import Topic, check_identity, identity_of
from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.events import Event, get_logger
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import Gap, Position, Record, TopicPartition

_MAX_TRIES = 3
"""So many rebuilds at one offset, then it is given up."""

_BOOTSTRAP_S = 10.0
_OFFSETS_TIMEOUT_MS = 10_000
_SLOW_S = 10.0
"""So long a broker that accepts connections may leave questions unanswered before it counts as unreachable."""
_CHORE_TIMEOUT_MS = 1_000
"""How long a question beside reading (end offsets, a position) may hold up training."""


class KafkaSource:
    """All partitions of some topics, endless. For one thread: kafka-python's consumer is not thread-safe."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        start_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._sleep = sleep
        self._cluster = Cluster(settings, bootstrap_s=min(start_timeout_s, _BOOTSTRAP_S))
        self._consumer: Any = None
        self._topics: dict[str, Topic] = {}
        self._next: dict[TopicPartition, int] = {}
        self._gaps: list[Gap] = []
        self._tries: dict[TopicPartition, dict[int, int]] = {}
        self._watch = PartitionMonitor(settings, clock)
        self._reachable = True
        self._unanswered_since: float | None = None
        self._truncation: LogTruncationError | None = None
        self._log = get_logger("connectors")

    # --- the Source protocol ------------------------------------------------------------------------------------------

    def seek(self, position: Position, identity: Mapping[str, str] | None = None) -> Position:
        """Connect and go to `position`; a broker that is down is waited for, `start_timeout_s` at most.

        A partition that `position` does not name begins at its earliest record when another of its topic is named (it
        was created since), else where `offset.start` says. A named offset that retention deleted is a gap, which
        `offset.gap.policy` may allow.

        Raises:
            OffsetGapError: a topic was deleted and created again, a named offset is gone, or it was never reached.
            SourceError: no broker, wrong credentials, or no such topic.
        """
        self._drop_consumer()
        wait_until_reachable(
            self._settings,
            self._start_timeout_s,
            on_wait=lambda: self._lost("no broker accepts a connection"),
            clock=self._clock,
            sleep=self._sleep,
        )
        self._topics = self._cluster.topics(self._settings.topics, to=[ACLOperation.READ])
        check_identity(identity or {}, self.identity)
        self._consumer = new_consumer(self._settings, _BOOTSTRAP_S)
        begins, ends = self._bounds([origin for topic in self._topics.values() for origin in topic.origins])
        settings = self._settings
        starts = starting_offsets(position, begins, ends, settings.offset_start, settings.offset_gap_policy)
        self._skip(position, starts)
        self._gaps.clear()  # the returned position tells of them
        self._assign()
        self._tries.clear()
        self._truncation = None
        self._watch.restart(ends)
        self._found()
        self._log.info(Event.SOURCE_OPENED, topics=list(self._topics), partitions=len(self._next))
        return Position(dict(self._next))

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """Return what is fetched, in offset order per partition; offsets may have gaps (compaction, transactions).

        Blocks up to `timeout_s`, beyond it a second when the cluster does not answer or a few when a broken consumer is
        replaced. A broker that is away gives nothing until it is back.

        Raises:
            OffsetGapError: retention overtook the position and `offset.gap.policy` is fail, a log was cut, or a topic
                was deleted and created again.
            SourceError: an offset cannot be read, whatever is tried, or the user may not read it.
        """
        started = self._clock()
        self._look_after()
        if self._consumer is None and not self._rebuild("lost"):
            self._sleep(max(0.0, timeout_s - (self._clock() - started)))
            return ()
        records = self._fetch(min(max_records, self._settings.max_poll_records), timeout_s)
        if records and not self._reachable and is_reachable(self._settings):  # they may have been fetched long before
            self._found()
        self._watch.polled(self._clock() - started, records)
        for record in records:
            self._next[record.origin] = record.offset + 1
        return records

    def commit(self, position: Position, note: str) -> None:
        """Store `position` as the group's offsets, for lag tools. A failure is logged."""
        try:
            self._cluster.commit(self._settings.group_id, position, note)
            self._log.info(Event.OFFSETS_COMMITTED, group=self._settings.group_id, note=note)
        except SourceError as error:
            self._log.warning(Event.OFFSET_COMMIT_FAILED, error=str(error), note=note)

    def lag(self, position: Position) -> Mapping[TopicPartition, int]:
        """Offsets between `position` and the ends; empty while the cluster does not answer. Blocks a second at most."""
        self._refresh_ends()
        return {origin: self._left(origin, position.get(origin, 0), end) for origin, end in self._watch.ends.items()}

    @property
    def identity(self) -> Mapping[str, str]:
        """The topics' ids, which brokers before Kafka 2.8 do not have."""
        return identity_of(self._topics.values())

    @property
    def gaps(self) -> Sequence[Gap]:
        """What `offset.gap.policy` allowed `poll` to jump over since `seek`."""
        return tuple(self._gaps)

    @property
    def exhausted(self) -> bool:
        """Never: more may be produced."""
        return False

    def close(self) -> None:
        """Close every connection. Safe to call twice."""
        self._drop_consumer()
        self._cluster.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _fetch(self, max_records: int, timeout_s: float) -> list[Record]:
        try:
            if self._truncation is not None:
                raise self._truncation
            polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        except Exception as error:  # noqa: BLE001 - a damaged batch raises anything from struct.error to ValueError
            self._recover(error)
            return []
        return [_record(message) for messages in polled.values() for message in messages]

    def _recover(self, error: Exception) -> None:
        """Go on after an error out of the consumer, or find out that nobody can.

        Raises:
            OffsetGapError: the position is not in the log, and must be.
            SourceError: too many tries at one offset, or the user may not read.
        """
        if isinstance(error, KafkaError) and error.retriable:
            return
        if isinstance(error, AuthorizationError):
            raise SourceError(f"every source topic must be readable: {describe(error)}") from error
        if isinstance(error, LogTruncationError):
            raise OffsetGapError(
                f"the log was cut and lost records that were trained: {error}. Start with --fresh to learn the new log"
            ) from error
        self._start_over(error)

    def _start_over(self, error: Exception) -> None:
        """Go on with a new consumer, behind a gap that is allowed, or where the old one failed."""
        if not self._skip_gaps():
            self._count_try(error)
        self._rebuild(describe(error))

    def _count_try(self, error: Exception) -> None:
        """Every partition that waits at the offset where it last failed comes one nearer to being given up."""
        waiting = {origin: at for origin, at in self._next.items() if self._watch.ends.get(origin, 0) > at}
        before = self._tries
        self._tries = {origin: {at: 1 + before.get(origin, {}).get(at, 0)} for origin, at in waiting.items()}
        stuck = [f"{origin} at offset {at}" for origin, at in waiting.items() if self._tries[origin][at] > _MAX_TRIES]
        if stuck:
            raise SourceError(
                f"every record must be readable, and {' or '.join(stuck)} was not, {_MAX_TRIES + 1} times: "
                f"{describe(error)}. Look at the log there with kafka-dump-log.sh; a restart tries again"
            ) from error

    def _rebuild(self, reason: str) -> bool:
        """Replace the consumer and go on from our own offsets; whether that worked."""
        self._drop_consumer()
        if not is_reachable(self._settings):
            self._lost("no broker accepts a connection")
            return False
        try:
            self._consumer = new_consumer(self._settings, _BOOTSTRAP_S)
        except SourceError as error:
            self._lost(str(error))
            return False
        self._assign()
        self._watch.restart()
        self._log.warning(Event.SOURCE_REBUILT, reason=reason, position=Position(self._next).to_json())
        return True

    def _assign(self) -> None:
        """Read every known partition from our own offset. What the consumer had buffered is fetched again."""
        self._consumer.assign([to_kafka(origin) for origin in self._next])
        for origin, offset in self._next.items():
            self._consumer.seek(to_kafka(origin), offset)

    def _drop_consumer(self) -> None:
        if self._consumer is not None:
            close_quietly(self._consumer)
            self._consumer = None

    # --- looking after the cluster ------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """The chores between polls, each at its own interval."""
        if self._consumer is None:
            return
        self._refresh_ends()
        stalled = self._watch.stalled()
        if stalled:
            error = SourceError(
                f"no record of {stalled} for {self._settings.stall_timeout_s:g} s although its log goes on"
            )
            self._start_over(error)
        elif self._reachable and self._watch.discovery_is_due():
            self._discover()

    def _refresh_ends(self) -> None:
        """Ask for the end of every log when `lag_interval_s` has passed."""
        if self._consumer is None or not self._watch.ends_are_due():
            return
        try:
            ends = self._consumer.end_offsets([to_kafka(origin) for origin in self._next], timeout_ms=_CHORE_TIMEOUT_MS)
            reached = {origin: self._reached(origin) for origin in self._next}
        except LogTruncationError as error:
            self._truncation = error  # the client says it once, here or in its poll; ours raises it
            return
        except CLIENT_ERRORS as error:
            self._watch.ends_unknown()
            self._unanswered(describe(error))
            return
        self._unanswered_since = None
        self._found()
        self._watch.learned({_origin(end): offset for end, offset in ends.items()}, reached)

    def _discover(self) -> None:
        """Begin to read partitions that were created since; each from its first record."""
        try:
            topics = self._cluster.topics(self._settings.topics)
            added = [origin for topic in topics.values() for origin in topic.origins if origin not in self._next]
            begins, _ = self._bounds(added)
        except SourceError as error:
            self._unanswered(str(error))
            return
        check_identity(self.identity, identity_of(topics.values()))
        self._topics = topics
        if added:
            self._next.update(begins)
            self._assign()
            self._log.info(
                Event.PARTITIONS_CHANGED, added=[str(origin) for origin in added], partitions=len(self._next)
            )

    def _bounds(self, origins: Sequence[TopicPartition]) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """First and next offset of each log.

        Raises:
            SourceError: the cluster does not answer.
        """
        if not origins:
            return {}, {}
        asked = [to_kafka(origin) for origin in origins]
        try:
            begins = self._consumer.beginning_offsets(asked, timeout_ms=_OFFSETS_TIMEOUT_MS)
            ends = self._consumer.end_offsets(asked, timeout_ms=_OFFSETS_TIMEOUT_MS)
        except CLIENT_ERRORS as error:
            raise SourceError(
                f"{self._settings.bootstrap_servers} does not tell its offsets: {describe(error)}"
            ) from error
        return {_origin(key): offset for key, offset in begins.items()}, {_origin(key): at for key, at in ends.items()}

    def _skip_gaps(self) -> bool:
        """Move every partition whose log does not hold our offset any more; whether there was one.

        False too while the cluster does not answer.

        Raises:
            OffsetGapError: `offset.gap.policy` does not allow it, a log was cut, or it is another topic's.
        """
        try:
            topics = self._cluster.topics(self._settings.topics)
            begins, ends = self._bounds(list(self._next))
        except SourceError:
            return False
        check_identity(self.identity, identity_of(topics.values()))
        self._watch.ends.update(ends)
        policy = self._settings.offset_gap_policy
        return self._skip(
            Position(dict(self._next)),
            {origin: going_on(origin, at, begins[origin], ends[origin], policy) for origin, at in self._next.items()},
        )

    def _skip(self, position: Position, starts: dict[TopicPartition, int]) -> bool:
        """Go on at `starts` instead of `position`, and say what is lost; whether anything is."""
        self._next = starts
        gaps = position.gaps_to(starts)
        for gap in gaps:
            self._log.warning(
                Event.OFFSETS_SKIPPED,
                partition=str(gap.origin),
                lost_from=gap.lost_from,
                lost_to=gap.lost_to,
                policy=self._settings.offset_gap_policy,
            )
        self._gaps += gaps
        return bool(gaps)

    def _left(self, origin: TopicPartition, start: int, end: int) -> int:
        """Offsets from `start` that may hold records; what was fetched behind the last record is markers alone."""
        if start == self._next.get(origin):
            start = max(start, self._watch.reached.get(origin, start))
        return max(0, end - start)

    def _reached(self, origin: TopicPartition) -> int:
        """The next offset to fetch, past markers that follow the last record."""
        position = self._consumer.position(to_kafka(origin), timeout_ms=_CHORE_TIMEOUT_MS)
        return max(self._next[origin], position or 0)

    def _found(self) -> None:
        if not self._reachable:
            self._log.info(Event.SOURCE_REACHABLE)
        self._reachable = True

    def _unanswered(self, reason: str) -> None:
        """A chore's question got no answer: the cluster is slow, or away."""
        now = self._clock()
        self._unanswered_since = now if self._unanswered_since is None else self._unanswered_since
        if now - self._unanswered_since >= _SLOW_S or not is_reachable(self._settings):
            self._lost(reason)

    def _lost(self, reason: str) -> None:
        """Say once that the cluster is away."""
        if self._reachable:
            self._log.warning(Event.SOURCE_UNREACHABLE, servers=self._settings.bootstrap_servers, reason=reason)
        self._reachable = False


def _record(message: Any) -> Record:
    return Record(
        origin=_origin(message),
        offset=message.offset,
        value=message.value,
        key=message.key,
        headers=tuple((name, value or b"") for name, value in message.headers),
        timestamp_ms=max(0, message.timestamp),
    )


def _origin(key: Any) -> TopicPartition:
    return TopicPartition(key.topic, key.partition)
