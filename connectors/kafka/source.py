"""Kafka topics as a source: all partitions are assigned, not subscribed, and only this module keeps positions.

kafka-python's consumer is disposable. After an error that its own retries do not cover, the next `poll` of the same
object may loop forever. The consumer is then closed, and a new one continues from the offsets kept here.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kafka.admin import ACLOperation
from kafka.errors import AuthorizationError, KafkaError, KafkaTimeoutError, LogTruncationError

from connectors.kafka.admin import Cluster, Topic, check_identity, identity_of
from connectors.kafka.clients import (
    CLIENT_ERRORS,
    close_quietly,
    describe,
    is_reachable,
    max_response_bytes,
    new_consumer,
    to_kafka,
    wait_until_reachable,
)
from connectors.kafka.offsets import (
    PartitionMonitor,
    beginning_offsets,
    end_offsets,
    resume_offset,
    starting_offsets,
)
from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.events import Event, get_logger
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import Gap, OffsetRange, Position, RecordId, TopicPartition
from streamlearn.stream.record import Record

_MAX_REBUILDS = 3
"""Maximum rebuilds per offset."""

_BOOTSTRAP_S = 10.0
_OFFSETS_TIMEOUT_S = 10.0
_LEADER_PAUSE_S = 0.5
"""Pause between two requests while a start waits for the leader of a partition."""
_UNREACHABLE_AFTER_S = 10.0
"""Maximum time without an answer from a broker that accepts connections; then it counts as unreachable."""
_REBUILD_PAUSE_MIN_S = 0.5
_REBUILD_PAUSE_MAX_S = 10.0
"""Maximum pause between two attempts to build a consumer, each of which may block for `_BOOTSTRAP_S`."""
_CHORE_TIMEOUT_S = 1.0
"""Maximum time that a request other than reading (end offsets, positions) may delay training."""

_Spans = tuple[dict[TopicPartition, int], dict[TopicPartition, int]]


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
        self._rebuild_pause_s = _REBUILD_PAUSE_MIN_S
        self._rebuild_at = 0.0
        self._topics: dict[str, Topic] = {}
        self._next: dict[TopicPartition, int] = {}
        self._gaps: list[Gap] = []
        self._failures: dict[TopicPartition, dict[int, int]] = {}
        self._skipped: Sequence[OffsetRange] = ()
        self._passing: dict[TopicPartition, int] = {}
        """Where reading continues after offsets that are skipped because they cannot be read."""
        self._committed: Mapping[TopicPartition, int] = {}
        self._note = ""
        self._monitor = PartitionMonitor(settings, clock)
        self._leaderless: list[str] = []
        self._reachable = True
        self._unanswered_since: float | None = None
        self._truncation: LogTruncationError | None = None
        self._log = get_logger("connectors")

    # --- the Source protocol ------------------------------------------------------------------------------------------

    def seek(
        self,
        position: Position,
        identity: Mapping[str, str] | None = None,
        skipped: Sequence[OffsetRange] = (),
    ) -> Position:
        """Connect and go to `position`; wait for an unreachable broker for at most `start_timeout_s`.

        See `starting_offsets` for where each partition begins. A named offset that retention deleted is a gap, which
        `offset.gap.policy` may allow. While a partition has no leader, its named offset is taken as it is; what `poll`
        finds there later is treated alike. If it has no named offset, the leader is waited for, as long as a broker.

        Raises:
            OffsetGapError: a topic was deleted and created again, a named offset is gone, or it was never reached.
            SourceError: no broker, wrong credentials, no such topic, or no leader of a partition without a position.
        """
        self._drop_consumer()
        wait_until_reachable(
            self._settings,
            self._start_timeout_s,
            on_wait=lambda: self._mark_unreachable("no broker accepts a connection"),
            clock=self._clock,
            sleep=self._sleep,
        )
        self._topics = self._cluster.source_topics(to=[ACLOperation.READ])
        check_identity(identity or {}, self.identity)
        self._consumer = new_consumer(self._settings, _BOOTSTRAP_S)
        origins = [origin for topic in self._topics.values() for origin in topic.origins]
        begins, ends = self._spans_at_start(origins, position)
        unchecked = {origin: position[origin] for origin in origins if origin not in begins}
        settings = self._settings
        # Topics that match a pattern and that no snapshot names were created after it.
        created_later = settings.topics_pattern is not None and bool(position)
        starts = starting_offsets(
            position,
            begins | unchecked,
            ends | unchecked,
            "earliest" if created_later else settings.offset_start,
            settings.offset_gap_policy,
            settings.isolation_level,
        )
        self._move_to(position, starts)
        self._gaps.clear()  # the returned position shows them
        self._assign()
        self._failures.clear()
        self._skipped = skipped
        self._passing.clear()
        self._truncation = None
        self._monitor.reset(ends)
        self._mark_reachable()
        log = self._log.info if self._topics else self._log.warning  # nothing matches the pattern yet
        log(Event.SOURCE_OPENED, topics=list(self._topics), partitions=len(self._next))
        return Position(dict(self._next))

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """Return fetched records, in offset order per partition; offsets may have gaps (compaction, transactions).

        Blocks up to `timeout_s`; a second longer if the cluster does not answer, a few seconds longer if the consumer
        must be replaced, which is tried with growing pauses. While no broker is reachable it returns nothing.

        Raises:
            OffsetGapError: retention overtook the position and `offset.gap.policy` is `fail`, a log was truncated, or
                a topic was deleted and created again.
            SourceError: an offset stays unreadable after `_MAX_REBUILDS`, or the user lacks permission.
        """
        started = self._clock()
        self._run_chores()
        if self._consumer is None and not self._rebuild_when_due():
            self._sleep(max(0.0, timeout_s - (self._clock() - started)))
            return ()
        records = self._pass_unreadable(max_records)
        if not records:
            records = self._fetch(min(max_records, self._settings.max_poll_records), timeout_s)
        if records and not self._reachable and is_reachable(self._settings):  # they may have been fetched earlier
            self._mark_reachable()
        self._monitor.observe_poll(self._clock() - started, records)
        for record in records:
            self._next[record.origin] = record.offset + 1
        return records

    def commit(self, position: Position, note: str) -> None:
        """Store `position` as the group's offsets, for lag tools. A failure is logged.

        Where `position` covers every record that was read, the offset after any transaction markers is stored, so that
        no lag remains at the end of a log; also when the client passes markers later.
        """
        fetched: Mapping[TopicPartition, int] = {}
        if self._consumer is not None:
            with suppress(*CLIENT_ERRORS):  # then the position itself is stored; `poll` meets the same error and acts
                fetched = self._fetch_offsets()
        self._commit(self._past_markers(position, fetched), note)

    def _commit(self, offsets: Mapping[TopicPartition, int], note: str) -> None:
        self._committed, self._note = offsets, note
        try:
            self._cluster.commit(self._settings.group_id, Position(offsets), note)
            self._log.info(Event.OFFSETS_COMMITTED, group=self._settings.group_id, note=note)
        except SourceError as error:
            self._log.warning(Event.OFFSET_COMMIT_FAILED, error=str(error), note=note)

    def _past_markers(
        self, offsets: Mapping[TopicPartition, int], fetched: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """`offsets`, moved to the next offset to fetch where no record lies between."""
        return {
            origin: max(at, fetched.get(origin, 0)) if at >= self._next.get(origin, at + 1) else at
            for origin, at in offsets.items()
        }

    def lag(self, position: Position) -> Mapping[TopicPartition, int]:
        """Offsets between `position` and the ends; empty while the cluster does not answer. Blocks a second at most.

        A partition is left out while it has no leader.
        """
        self._refresh_ends()
        ends = self._monitor.ends
        return {origin: self._remaining(origin, position.get(origin, 0), end) for origin, end in ends.items()}

    @property
    def identity(self) -> Mapping[str, str]:
        """The topics' ids; brokers before Kafka 2.8 have none."""
        return identity_of(self._topics.values())

    @property
    def gaps(self) -> Sequence[Gap]:
        """What `offset.gap.policy` allowed `poll` to skip since `seek`."""
        return tuple(self._gaps)

    @property
    def reached(self) -> Mapping[TopicPartition, int]:
        """The next offset to fetch, past transaction markers and removed records, at most `lag_interval_s` old."""
        fetched = self._monitor.fetch_offsets
        return {origin: max(at, fetched.get(origin, 0)) for origin, at in self._next.items()}

    @property
    def exhausted(self) -> bool:
        return False

    def close(self) -> None:
        self._drop_consumer()
        self._cluster.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _fetch(self, max_records: int, timeout_s: float) -> list[Record]:
        if not self._next:
            self._sleep(timeout_s)
            return []
        try:
            if self._truncation is not None:
                raise self._truncation
            polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        except Exception as error:  # noqa: BLE001 - a damaged batch raises anything from struct.error to ValueError
            self._recover(error)
            return []
        return [_record(message) for messages in polled.values() for message in messages]

    def _pass_unreadable(self, max_records: int) -> list[Record]:
        """Return records without content for skipped offsets that cannot be read, and continue after them."""
        records = []
        for origin, end in list(self._passing.items()):
            start = self._next[origin]
            stop = min(end, start + max_records)
            self._consumer.seek(to_kafka(origin), stop)
            records += [Record(origin, at, None, unreadable="it could not be read") for at in range(start, stop)]
            if stop == end:
                del self._passing[origin]
        return records

    def _recover(self, error: Exception) -> None:
        """Recover from an error of the consumer, if possible.

        1. After a retriable error the consumer retries by itself.
        2. A missing permission and a truncated log are fatal.
        3. After any other error the consumer is replaced.
        """
        if isinstance(error, KafkaError) and error.retriable:  # 1.
            return
        if isinstance(error, AuthorizationError):  # 2.
            raise SourceError(f"every source topic must be readable: {describe(error)}") from error
        if isinstance(error, LogTruncationError):
            raise OffsetGapError(
                f"the log was truncated and lost records that were trained: {error}. Start over with --fresh to learn "
                "the new log"
            ) from error
        self._replace_consumer(error)  # 3.

    def _replace_consumer(self, error: Exception) -> None:
        """Continue with a new consumer: after a gap if gaps are allowed, otherwise at the offset that failed."""
        if not self._skip_gaps():
            self._count_failure(error)
        self._rebuild(describe(error))

    def _count_failure(self, error: Exception) -> None:
        """Count a failure at the offset of every partition with unread records."""
        unread = {origin: at for origin, at in self._next.items() if self._monitor.ends.get(origin, 0) > at}
        before = self._failures
        self._failures = {origin: {at: 1 + before.get(origin, {}).get(at, 0)} for origin, at in unread.items()}
        failed = [
            RecordId(*record) for record in unread.items() if self._failures[record[0]][record[1]] > _MAX_REBUILDS
        ]
        for record in failed:
            for skipped in self._skipped:
                if record in skipped:
                    self._passing[record.origin] = min(skipped.last + 1, self._monitor.ends[record.origin])
        stuck = [f"{origin} at offset {at}" for origin, at in failed]
        if stuck and not self._passing:
            origin, at = failed[0]
            raise SourceError(
                f"every record must be readable, {' or '.join(stuck)} failed {_MAX_REBUILDS + 1} times: "
                f"{describe(error)}. Examine the log there with kafka-dump-log.sh; a restart tries again. To go on "
                "without them: streamlearn snapshots rollback NAME --skip-records "
                f"{origin.topic}:{origin.partition}:{at}..TO"
            ) from error

    def _rebuild_when_due(self) -> bool:
        """Build a consumer if the pause after the last attempt is over; return whether there is one."""
        return self._clock() >= self._rebuild_at and self._rebuild("the previous consumer was closed")

    def _rebuild(self, reason: str) -> bool:
        """Replace the consumer and continue from our own offsets; return whether that worked."""
        self._drop_consumer()
        if not is_reachable(self._settings):
            return self._postpone_rebuild("no broker accepts a connection")
        try:
            self._consumer = new_consumer(self._settings, _BOOTSTRAP_S)
        except SourceError as error:
            return self._postpone_rebuild(str(error))
        self._rebuild_pause_s = _REBUILD_PAUSE_MIN_S
        self._assign()
        self._monitor.reset()
        self._log.warning(Event.SOURCE_REBUILT, reason=reason, position=Position(self._next).to_json())
        return True

    def _postpone_rebuild(self, reason: str) -> bool:
        """Note why no consumer could be built, and pause before the next attempt; return False."""
        self._mark_unreachable(reason)
        self._rebuild_at = self._clock() + self._rebuild_pause_s
        self._rebuild_pause_s = min(2 * self._rebuild_pause_s, _REBUILD_PAUSE_MAX_S)
        return False

    def _assign(self) -> None:
        """Read every known partition from our own offset. Records that the consumer had buffered are fetched again."""
        self._consumer.assign([to_kafka(origin) for origin in self._next])
        for origin, offset in self._next.items():
            self._consumer.seek(to_kafka(origin), offset)

    def _drop_consumer(self) -> None:
        if self._consumer is not None:
            close_quietly(self._consumer)
            self._consumer = None

    # --- chores -------------------------------------------------------------------------------------------------------

    def _run_chores(self) -> None:
        if self._consumer is None:
            return
        self._refresh_ends()
        stalled = self._monitor.stalled_partitions()
        if stalled:
            error = SourceError(
                f"no record of {stalled} for {self._settings.stall_timeout_s:g} s although its log has unread records. "
                f"A record batch of more than {max_response_bytes(self._settings)} bytes is never delivered: if there "
                "is one, raise source.kafka.fetch.max.bytes to its size"
            )
            self._replace_consumer(error)
        elif self._reachable and self._monitor.discovery_is_due():
            self._discover_partitions()

    def _refresh_ends(self) -> None:
        """Request the end of every log, if `lag_interval_s` has passed."""
        if self._consumer is None or not self._monitor.ends_are_due():
            return
        try:
            ends = end_offsets(self._consumer, self._next, partial=True, timeout_ms=_ms(_CHORE_TIMEOUT_S))
            fetch_offsets = self._fetch_offsets()
        except LogTruncationError as error:
            self._truncation = error  # the client raises it once, here or in its poll; our next poll raises it
            return
        except CLIENT_ERRORS as error:
            self._monitor.clear_ends()
            self._note_no_answer(describe(error))
            return
        self._unanswered_since = None
        self._mark_reachable()
        self._monitor.update_ends(ends, fetch_offsets)
        past_markers = self._past_markers(self._committed, fetch_offsets)
        if past_markers != self._committed:
            self._commit(past_markers, self._note)
        self._note_leaders(self._next, ends)

    def _discover_partitions(self) -> None:
        """Start reading new partitions, each from its first record, once it has a leader."""
        try:
            topics = self._cluster.source_topics()
            added = [origin for topic in topics.values() for origin in topic.origins if origin not in self._next]
            begins, _ = self._log_spans(added)
        except SourceError as error:
            self._note_no_answer(str(error))
            return
        check_identity(self.identity, identity_of(topics.values()))
        self._topics |= topics  # one that was deleted keeps its id and its offset
        if begins:
            self._next.update(begins)
            self._assign()
            self._log.info(
                Event.PARTITIONS_CHANGED, added=[str(origin) for origin in begins], partitions=len(self._next)
            )

    def _spans_at_start(self, origins: Sequence[TopicPartition], position: Position) -> _Spans:
        """First and next offset of each log; not of one without a leader if `position` names it."""
        deadline = self._clock() + self._start_timeout_s
        while True:
            begins, ends = self._log_spans(origins, self._start_timeout_s)
            self._note_leaders(origins, ends)
            missing = [str(origin) for origin in origins if origin not in begins and origin not in position]
            if not missing:
                return begins, ends
            if self._clock() + _LEADER_PAUSE_S > deadline:
                raise SourceError(
                    f"every partition that was never read must have a leader, {', '.join(missing)} had none for "
                    f"{self._start_timeout_s:g} s. {self._how_to_find_leaders}"
                )
            self._sleep(_LEADER_PAUSE_S)

    @property
    def _how_to_find_leaders(self) -> str:
        return (
            "Start the brokers that hold the replicas which kafka-topics.sh "
            f"--bootstrap-server {self._settings.bootstrap_servers} --describe --unavailable-partitions shows"
        )

    def _log_spans(self, origins: Sequence[TopicPartition], timeout_s: float = _OFFSETS_TIMEOUT_S) -> _Spans:
        """First and next offset of each log whose partition has a leader."""
        if not origins:
            return {}, {}
        try:
            begins = beginning_offsets(self._consumer, origins, partial=True, timeout_ms=_ms(timeout_s))
            ends = end_offsets(self._consumer, begins, partial=True, timeout_ms=_ms(timeout_s))
        except KafkaTimeoutError as error:
            raise SourceError(
                f"{self._settings.bootstrap_servers} did not answer a request for the offsets of "
                f"{', '.join(map(str, origins))} in {timeout_s:g} s: none of them has a leader, or the brokers are "
                f"slow. {self._how_to_find_leaders}"
            ) from error
        except CLIENT_ERRORS as error:
            raise SourceError(
                f"{self._settings.bootstrap_servers} did not answer a request for offsets: {describe(error)}"
            ) from error
        return {origin: begins[origin] for origin in ends}, ends

    def _skip_gaps(self) -> bool:
        """Move every partition whose log no longer holds our offset; return whether there was one.

        Also returns False while the cluster does not answer.
        """
        try:
            topics = self._cluster.source_topics()
            begins, ends = self._log_spans(list(self._next))
        except SourceError:
            return False
        check_identity(self.identity, identity_of(topics.values()))
        self._monitor.ends.update(ends)
        policy, isolation_level = self._settings.offset_gap_policy, self._settings.isolation_level
        resumed = {
            origin: resume_offset(origin, self._next[origin], begins[origin], end, policy, isolation_level)
            for origin, end in ends.items()
        }
        return self._move_to(Position(dict(self._next)), self._next | resumed)

    def _move_to(self, position: Position, starts: dict[TopicPartition, int]) -> bool:
        """Continue at `starts` instead of `position`, and log the gaps; return whether there are any."""
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

    def _remaining(self, origin: TopicPartition, start: int, end: int) -> int:
        """Offsets from `start` that may hold records, without the markers already fetched after the last record."""
        if start == self._next.get(origin):
            start = max(start, self._monitor.fetch_offsets.get(origin, start))
        return max(0, end - start)

    def _fetch_offsets(self) -> dict[TopicPartition, int]:
        """The next offset to fetch of each partition, past any transaction markers after the last record.

        The client validates all offsets first, those of partitions without a leader too, until the time is up.
        """
        deadline = self._clock() + _CHORE_TIMEOUT_S
        offsets = {}
        for origin, offset in self._next.items():
            remaining_s = max(0.0, deadline - self._clock())
            at = self._consumer.position(to_kafka(origin), timeout_ms=_ms(remaining_s))
            offsets[origin] = max(offset, at or 0)
        return offsets

    def _note_leaders(self, origins: Collection[TopicPartition], available: Collection[TopicPartition]) -> None:
        """Log when a partition has lost its leader, and when it has one again."""
        leaderless = [str(origin) for origin in origins if origin not in available]
        if leaderless != self._leaderless:
            log = self._log.warning if leaderless else self._log.info
            log(Event.PARTITIONS_CHANGED, without_leader=leaderless, partitions=len(origins))
        self._leaderless = leaderless

    def _mark_reachable(self) -> None:
        if not self._reachable:
            self._log.info(Event.SOURCE_REACHABLE)
        self._reachable = True

    def _note_no_answer(self, reason: str) -> None:
        """Handle a chore's request without an answer: the cluster is slow or unreachable."""
        now = self._clock()
        self._unanswered_since = now if self._unanswered_since is None else self._unanswered_since
        if now - self._unanswered_since >= _UNREACHABLE_AFTER_S or not is_reachable(self._settings):
            self._mark_unreachable(reason)

    def _mark_unreachable(self, reason: str) -> None:
        if self._reachable:
            self._log.warning(Event.SOURCE_UNREACHABLE, servers=self._settings.bootstrap_servers, reason=reason)
        self._reachable = False


def _record(message: Any) -> Record:
    return Record(
        origin=_origin(message),
        offset=message.offset,
        value=message.value,
        key=message.key,
        headers=tuple(message.headers),
        timestamp_ms=max(0, message.timestamp),
        unreadable=message.checksum if isinstance(message.checksum, str) else "",
    )


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _origin(key: Any) -> TopicPartition:
    return TopicPartition(key.topic, key.partition)
