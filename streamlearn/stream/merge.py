"""Merging of several partitions into one order.

Live, records are taken in the order in which the source returns them. That order is journalled with each batch, and so
is every flush. After a restart the journalled runs are taken first, in the same order, so that several partitions
replay as exactly as one; at a journalled flush nothing more is taken until the caller has repeated it.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import Enum

from streamlearn.events import Event, get_logger
from streamlearn.stream.batch import PartitionRun
from streamlearn.stream.record import Record, TopicPartition
from streamlearn.stream.source import RecordReader

_log = get_logger("stream")


class Mark(Enum):
    """What a journalled order holds besides runs of records."""

    FLUSH = "flush"
    """The stream was flushed after the records before it."""


class Merger:
    """Takes records from a source, in the journalled order as far as it goes, then in the order of arrival."""

    def __init__(self, source: RecordReader, journalled: Iterable[PartitionRun | Mark] = ()) -> None:
        self._source = source
        self._planned: deque[TopicPartition | Mark] = deque()
        for item in journalled:
            self._planned.extend([item] if isinstance(item, Mark) else [item.origin] * item.num_records)
        self._waiting: dict[TopicPartition, deque[Record]] = defaultdict(deque)

    @property
    def exhausted(self) -> bool:
        """Whether the source will never return anything again."""
        return self._source.exhausted

    @property
    def follows_journal(self) -> bool:
        """Whether records or flushes of the journalled order are still to come."""
        return bool(self._planned)

    @property
    def at_flush(self) -> bool:
        """Whether the stream was flushed at this place; `pass_flush` goes on."""
        return bool(self._planned) and self._planned[0] is Mark.FLUSH

    def pass_flush(self) -> None:
        """Go past the journalled flush at this place, if there is one."""
        if self.at_flush:
            self._planned.popleft()

    def take(self, *, max_records: int, timeout_s: float) -> Iterator[Record]:
        """Return the records that are ready, in order; empty when none arrived within `timeout_s`, or at a flush.

        While a journalled order is followed, records of other partitions wait in memory: as many as the source returns
        before the expected one arrives. A record that the source skipped never arrives; the order is dropped then.
        """
        if self.at_flush:
            return
        records = self._source.poll(max_records=max_records, timeout_s=timeout_s)
        self._drop_order_at_gap()
        for record in records:
            self._waiting[record.origin].append(record)
            if not self._planned:
                yield from self._drain(record.origin)
        yield from self._follow_order()

    def _drop_order_at_gap(self) -> None:
        gaps = self._source.gaps if self._planned else ()
        gap = next((gap for gap in gaps if gap.origin in self._planned), None)
        if gap is not None:
            _log.warning(
                Event.JOURNAL_TRUNCATED,
                fault=f"records of {gap.origin} must be read again, but [{gap.lost_from}, {gap.lost_to}) is gone",
                lost=f"the replay order of {sum(each is not Mark.FLUSH for each in self._planned)} records",
            )
            self._planned.clear()

    def _follow_order(self) -> Iterator[Record]:
        while self._planned:
            expected = self._planned[0]
            if isinstance(expected, Mark) or not self._waiting[expected]:
                return
            self._planned.popleft()
            yield self._waiting[expected].popleft()
        for origin in sorted(self._waiting):
            yield from self._drain(origin)

    def _drain(self, origin: TopicPartition) -> Iterator[Record]:
        waiting = self._waiting[origin]
        while waiting:
            yield waiting.popleft()
