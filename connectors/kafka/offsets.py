"""Offsets: where the logs of partitions begin and end, where reading begins, what is due, and what has stalled."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from kafka.errors import KafkaError, LeaderNotAvailableError

from connectors.kafka.clients import to_kafka
from streamlearn.errors import OffsetGapError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import Record

_POLL_MS = 500
Offsets = Mapping[TopicPartition, int]
GapPolicy = Literal["fail", "earliest", "latest"]
IsolationLevel = Literal["read_committed", "read_uncommitted"]

_OPEN_TRANSACTION: Mapping[IsolationLevel, str] = {
    "read_committed": (
        "A transaction may be open there if isolation.level was read_uncommitted before: restart when it has ended. "
        "Otherwise "
    ),
    "read_uncommitted": "",
}


def starting_offsets(
    position: Offsets,
    begins: Offsets,
    ends: Offsets,
    offset_start: Literal["earliest", "latest"],
    gap_policy: GapPolicy = "fail",
    isolation_level: IsolationLevel = "read_committed",
) -> dict[TopicPartition, int]:
    """Return the first offset to read of every existing partition.

    1. A partition that `position` names continues at its offset, or after a gap: see `resume_offset`.
    2. Another partition of a topic that `position` names was created later: it begins at its earliest record.
    3. A partition of a new topic begins where `offset_start` says.

    Raises:
        OffsetGapError: a named offset was deleted and gaps are not allowed, was never reached, or its whole partition
            is gone.
    """
    known_topics = {origin.topic for origin in position}
    check_partitions_exist({origin: position[origin] for origin in position}, begins)
    starts = {}
    for origin in sorted(begins):
        if origin in position:  # 1.
            starts[origin] = resume_offset(
                origin, position[origin], begins[origin], ends[origin], gap_policy, isolation_level
            )
        elif origin.topic in known_topics or offset_start == "earliest":  # 2., 3.
            starts[origin] = begins[origin]
        else:  # 3.
            starts[origin] = ends[origin]
    return starts


def resume_offset(
    origin: TopicPartition, offset: int, begin: int, end: int, gap_policy: GapPolicy, isolation_level: IsolationLevel
) -> int:
    """Return `offset` if the log holds it; if retention deleted it, the offset that `gap_policy` chooses.

    With `read_committed`, the log ends where the first open transaction begins.

    Raises:
        OffsetGapError: the offset was deleted and the policy is `fail`, or it lies past the end; the message names the
            gap.
    """
    if offset < begin and gap_policy == "fail":
        raise OffsetGapError(
            f"{origin} must resume at offset {offset}, its log begins at {begin}: the {begin - offset} offsets "
            f"[{offset}, {begin}) were deleted before they were trained. Set offset.gap.policy to earliest (or latest) "
            "to continue without them, or start over with --fresh. Raise the topic's "
            "retention.ms"
        )
    if offset > end:
        raise OffsetGapError(
            f"{origin} must resume at offset {offset}, its log ends at {end}. {_OPEN_TRANSACTION[isolation_level]}"
            f"[{end}, {offset}) was trained and is gone: the topic was truncated, or deleted and created again. Start "
            "over with --fresh to learn the new log"
        )
    if offset < begin:
        return begin if gap_policy == "earliest" else end
    return offset


def check_partitions_exist(position: Offsets, existing: Collection[TopicPartition]) -> None:
    """Check that every named partition of an existing topic exists.

    Raises:
        OffsetGapError: a partition with trained records is gone.
    """
    topics = {origin.topic for origin in existing}
    for origin, offset in position.items():
        if origin.topic in topics and origin not in existing:
            raise OffsetGapError(
                f"{origin} was trained up to offset {offset} and no longer exists: the topic was deleted and created "
                "again with fewer partitions. Start over with --fresh to learn the new one"
            )


def beginning_offsets(
    consumer: Any, partitions: Iterable[TopicPartition], *, partial: bool = False, timeout_ms: int | None = None
) -> dict[TopicPartition, int]:
    """The offset of the first message that each partition still holds; arguments and errors as in `end_offsets`."""
    return _request(consumer.beginning_offsets, partitions, partial, timeout_ms)


def end_offsets(
    consumer: Any, partitions: Iterable[TopicPartition], *, partial: bool = False, timeout_ms: int | None = None
) -> dict[TopicPartition, int]:
    """The offset after the last message of each partition; of the last committed one with `read_committed`.

    Args:
        consumer: kafka-python's.
        partitions: Whose offsets are requested.
        partial: Whether to leave out partitions without a leader, as long as one has a leader.
        timeout_ms: By default `request_timeout_ms`.

    Raises:
        KafkaError: a partition has no leader, or the cluster does not answer.
    """
    return _request(consumer.end_offsets, partitions, partial, timeout_ms)


def read_between(
    consumer: Any, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], *, timeout_ms: int
) -> Iterator[Any]:
    """Yield every message from `starts` to `ends`, in order per partition.

    Raises:
        KafkaError: nothing came for `timeout_ms`.
    """
    unread = {to_kafka(origin): ends[origin] for origin, start in starts.items() if start < ends[origin]}
    consumer.assign(list(unread))
    for partition in unread:
        consumer.seek(partition, starts[TopicPartition(*partition)])
    remaining_ms = timeout_ms
    while unread:
        messages = consumer.poll(timeout_ms=_POLL_MS)
        for partition, batch in messages.items():
            yield from (message for message in batch if message.offset < ends[TopicPartition(*partition)])
        remaining_ms = timeout_ms if messages else remaining_ms - _POLL_MS
        if remaining_ms <= 0:
            raise KafkaError(f"no message for {timeout_ms} ms before the end of the topic")
        unread = {partition: end for partition, end in unread.items() if consumer.position(partition) < end}


def _request(
    request: Callable[..., Mapping[Any, int]],
    partitions: Iterable[TopicPartition],
    partial: bool,
    timeout_ms: int | None,
) -> dict[TopicPartition, int]:
    """Request offsets without those of partitions that have no leader.

    kafka-python waits for a leader if none of the partitions has one. If only some have, it raises a bare KeyError.
    """
    with_leader = [to_kafka(origin) for origin in partitions]
    missing: list[str] = []
    while True:
        try:
            offsets = request(with_leader, timeout_ms=timeout_ms)
        except KeyError as error:
            with_leader.remove(error.args[0])
            missing.append(str(TopicPartition(*error.args[0])))
        else:
            break
    if missing and not partial:
        raise LeaderNotAvailableError(
            f"every partition must have a leader, {', '.join(missing)} has none. Start a broker that holds a replica"
        )
    return {TopicPartition(*partition): offset for partition, offset in offsets.items()}


_NEVER = float("-inf")


class PartitionMonitor:
    """Due times of chores, log ends, and stalled partitions of one `KafkaSource`; does no I/O.

    Because of bugs in kafka-python, a partition may stop being fetched although its log grows; only a new consumer
    helps. Only time spent polling counts as silence, so a long training step between two polls is not a stall.
    """

    def __init__(self, settings: KafkaSettings, clock: Callable[[], float]) -> None:
        self.ends: dict[TopicPartition, int] = {}
        """End of each log, at most `lag_interval_s` old; without those that are unknown."""
        self.fetch_offsets: dict[TopicPartition, int] = {}
        """Next offset to fetch at the time of `ends`, past any transaction markers after the last record."""
        self._settings = settings
        self._clock = clock
        self._ends_requested_at = _NEVER
        self._discovered_at = clock()
        self._polled_s = 0.0
        self._active: set[TopicPartition] = set()
        self._silent_s: dict[TopicPartition, float] = {}

    def reset(self, ends: Mapping[TopicPartition, int] | None = None) -> None:
        """Restart the counts of silence for a new consumer; `ends` were just requested, for a new position."""
        if ends is not None:
            self.ends = dict(ends)
            self.fetch_offsets = {}
            self._ends_requested_at = self._discovered_at = self._clock()
        self._polled_s = 0.0
        self._active.clear()
        self._silent_s.clear()

    def observe_poll(self, seconds: float, records: Iterable[Record]) -> None:
        self._polled_s += seconds
        self._active |= {record.origin for record in records}

    def ends_are_due(self) -> bool:
        """Return whether `lag_interval_s` has passed since the last request for the ends, answered or not."""
        return self._clock() - self._ends_requested_at >= self._settings.lag_interval_s

    def update_ends(self, ends: Mapping[TopicPartition, int], fetch_offsets: Mapping[TopicPartition, int]) -> None:
        """Set the ends, and count silence for partitions that had unread records since the last update."""
        lagging = {origin for origin, end in self.ends.items() if end > fetch_offsets[origin]}
        for origin in ends:
            silent = origin in lagging and origin not in self._active
            self._silent_s[origin] = self._silent_s.get(origin, 0.0) + self._polled_s if silent else 0.0
        self.ends = dict(ends)
        self.fetch_offsets = dict(fetch_offsets)
        self._ends_requested_at = self._clock()
        self._polled_s = 0.0
        self._active.clear()

    def clear_ends(self) -> None:
        """Forget the ends after a request without an answer; the next one is due after the interval."""
        self.ends.clear()
        self._ends_requested_at = self._clock()

    def stalled_partitions(self) -> str:
        """Return the partitions that were silent for `stall_timeout_s`, comma-separated; usually empty."""
        return ", ".join(
            str(origin) for origin, silent_s in self._silent_s.items() if silent_s >= self._settings.stall_timeout_s
        )

    def discovery_is_due(self) -> bool:
        """Return whether `metadata_max_age_ms` has passed since this last returned True."""
        due = self._clock() - self._discovered_at >= self._settings.metadata_max_age_ms / 1000
        if due:
            self._discovered_at = self._clock()
        return due
