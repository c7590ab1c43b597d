"""Merging of several partitions into one order.

Live, records are taken in the order in which the source returns them. That order is journalled with each batch, and so
is every flush. After a restart the journalled runs are taken first, in the same order, so that several partitions
replay as exactly as one; at a journalled flush nothing more is taken until the caller has repeated it.

A journalled record may never come again: compaction removed it, `isolation.level` was changed, or the leader of its
partition is down. What becomes of the order then:

    1. A run ends with the offset that its last record had, whether all of its records came or not. Whatever comes of
       the partition at or after that offset, or shows that the source has passed it, ends the run.
    2. The order is dropped when records of the partition are in a gap, and when it holds up the others for too long:
       `MAX_WAITING_RECORDS`, `MAX_WAITING_BYTES`, `MAX_SILENCE_S`.

No record is lost by either, and both are logged.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from enum import Enum

from streamlearn.events import Event, get_logger
from streamlearn.stream.batch import PartitionRun
from streamlearn.stream.record import Record, TopicPartition
from streamlearn.stream.source import RecordReader

MAX_WAITING_RECORDS = 100_000
"""Maximum records of other partitions that wait for a journalled one: 200 polls of Kafka's default 500. A partition
that is so far behind the others is not slow, but down."""
MAX_WAITING_BYTES = 256 << 20
"""Maximum size of their values; as much as one record batch of Kafka may have (`max_decompressed_bytes`)."""
MAX_SILENCE_S = 600.0
"""Maximum time of polling for a journalled record while others wait: ten times `stall_timeout_s`, after which a Kafka
consumer is replaced. The election of a leader and the restart of a broker take less."""

_log = get_logger("stream")


class Mark(Enum):
    """What a journalled order holds besides runs of records."""

    FLUSH = "flush"
    """The stream was flushed after the records before it."""


class Merger:
    """Takes records from a source, in the journalled order as far as it goes, then in the order of arrival."""

    def __init__(
        self,
        source: RecordReader,
        journalled: Iterable[PartitionRun | Mark] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`, monotonic and in seconds, measures for how long polls return no record that is next in the order."""
        self._source = source
        self._clock = clock
        self._planned = deque(journalled)
        self._num_taken = 0  # records of the first run that is planned
        self._silent_s = 0.0
        self._is_incomplete = False
        self._waiting: dict[TopicPartition, deque[Record]] = defaultdict(deque)
        self._num_waiting = 0
        self._waiting_bytes = 0
        self._ends: dict[TopicPartition, int] = {}  # the offset after the last record that came, while planned

    @property
    def exhausted(self) -> bool:
        """Whether `take` will never return anything again."""
        return self._source.exhausted and not self._num_waiting

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

    def take(self, *, max_records: int, timeout_s: float) -> list[Record]:
        """Return the records that are ready, in order; empty when none arrived within `timeout_s`, or at a flush.

        While a journalled order is followed, records of other partitions wait in memory, within the limits of this
        module.
        """
        taken = self._take_waiting(max_records)
        if taken or self.at_flush:
            return taken
        polled = self._poll(max_records, timeout_s)
        if not self._planned and not self._num_waiting:
            return polled
        for record in polled:
            self._put(record)
        taken = self._take_waiting(max_records)
        if not taken and self._is_held_up():
            taken = self._take_waiting(max_records)
        return taken

    def _poll(self, max_records: int, timeout_s: float) -> list[Record]:
        started = self._clock()
        records = list(self._source.poll(max_records=max_records, timeout_s=timeout_s))
        self._silent_s += self._clock() - started
        if self._planned and self._source.gaps:
            self._drop_order_at_gap()
        return records

    def _drop_order_at_gap(self) -> None:
        planned = {item.origin for item in self._planned if isinstance(item, PartitionRun)}
        gap = next((gap for gap in self._source.gaps if gap.origin in planned), None)
        if gap is not None:
            self._drop_order(
                f"records of {gap.origin} must be read again, but [{gap.lost_from}, {gap.lost_to}) is gone"
            )

    def _drop_order(self, fault: str) -> None:
        left = sum(item.num_records for item in self._planned if isinstance(item, PartitionRun)) - self._num_taken
        _log.warning(Event.JOURNAL_TRUNCATED, fault=fault, lost=f"the replay order of {left} records")
        self._planned.clear()

    def _take_waiting(self, max_records: int) -> list[Record]:
        """What has come and is next in the order."""
        taken: list[Record] = []
        self._end_runs()
        while len(taken) < max_records and (origin := self._next_origin()) is not None:
            taken.append(self._pop(origin))
            self._end_runs()
        return taken

    def _next_origin(self) -> TopicPartition | None:
        """The partition of the next record; None at a flush, or if the record has not come."""
        if not self._planned:
            return min((origin for origin, records in self._waiting.items() if records), default=None)
        run = self._planned[0]
        return run.origin if isinstance(run, PartitionRun) and self._has_come(run) else None

    def _end_runs(self) -> None:
        """Go on with what is planned next, unless a record of the first run has come or is still to come."""
        while self._planned:
            run = self._planned[0]
            if isinstance(run, Mark) or self._has_come(run) or not self._is_over(run):
                return
            self._end_run(run)

    def _has_come(self, run: PartitionRun) -> bool:
        waiting = self._waiting[run.origin]
        return bool(waiting) and waiting[0].offset < run.next_offset

    def _is_over(self, run: PartitionRun) -> bool:
        """Whether no record of the run is still to come."""
        if self._ends.get(run.origin, 0) >= run.next_offset or self._source.exhausted:
            return True
        return self._source.reached.get(run.origin, 0) >= run.next_offset

    def _end_run(self, run: PartitionRun) -> None:
        """Go past a run; log the first one of which records did not come."""
        if self._num_taken < run.num_records and not self._is_incomplete:
            self._is_incomplete = True
            _log.warning(
                Event.JOURNAL_TRUNCATED,
                fault=f"{run.num_records} records of {run.origin} in [{run.first_offset}, {run.next_offset}) must be "
                f"read again, found {self._num_taken}",
                lost="the composition of the batches from there on; their order is kept",
            )
        self._planned.popleft()
        self._num_taken = 0

    def _is_held_up(self) -> bool:
        """Whether so much waited for the next run, or anything for so long, that the order was dropped now."""
        run = self._planned[0] if self._planned else Mark.FLUSH
        is_silent = self._num_waiting > 0 and self._silent_s >= MAX_SILENCE_S
        is_full = self._num_waiting > MAX_WAITING_RECORDS or self._waiting_bytes > MAX_WAITING_BYTES
        if isinstance(run, Mark) or not (is_silent or is_full):
            return False
        self._drop_order(
            f"records of {run.origin} before offset {run.next_offset} must be read again and did not come in "
            f"{self._silent_s:.0f} s, while {self._num_waiting} others of {self._waiting_bytes} bytes wait"
        )
        return True

    def _put(self, record: Record) -> None:
        self._waiting[record.origin].append(record)
        self._ends[record.origin] = record.offset + 1
        self._num_waiting += 1
        self._waiting_bytes += len(record.value or b"")

    def _pop(self, origin: TopicPartition) -> Record:
        record = self._waiting[origin].popleft()
        self._num_taken += 1
        self._silent_s = 0.0
        self._num_waiting -= 1
        self._waiting_bytes -= len(record.value or b"")
        return record
