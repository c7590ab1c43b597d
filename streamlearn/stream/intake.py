"""The intake: reads records from a source, decodes them, and forms batches; unusable records become dead letters.

Only this module decides what happens to a record: it ends up in a batch's `records` or in its `dead_lettered`.

If records hold images and a core is free, they are decoded ahead of time in another thread while the learner works.
The order of the stream does not change.

A flush closes the open batch, and nothing that was read waits for more records. It is due when the stream ends, when no
record came for the linger, and wherever the journal holds one.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, StrEnum
from types import MappingProxyType

from streamlearn.errors import Reason, RecordError
from streamlearn.events import Event, get_logger
from streamlearn.stream.batch import Batch, Batcher, PartitionRun
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Example, Gap, OffsetRange, Position, Record, RecordId, TopicPartition
from streamlearn.stream.source import DeadLetter, DeadLetters, RecordReader


class Linger:
    """Measures for how long polls have returned nothing.

    Only waiting counts: the time starts with the first poll that returns nothing, not with the last record, since a
    long step may lie between them.
    """

    def __init__(self, linger_s: float | None, clock: Callable[[], float]) -> None:
        """It expires after `linger_s` seconds, never if that is None. `clock` is monotonic, in seconds."""
        self._linger_s = linger_s
        self._clock = clock
        self._since: float | None = None

    def observe_poll(self, num_records: int) -> None:
        """Note what a poll returned."""
        if num_records:
            self.restart()
        elif self._since is None:
            self._since = self._clock()

    def restart(self) -> None:
        """Begin anew with the next poll that returns nothing."""
        self._since = None

    @property
    def expired(self) -> bool:
        """Whether nothing was returned for `linger_s` seconds."""
        if self._linger_s is None or self._since is None:
            return False
        return self._clock() - self._since >= self._linger_s


# Merging of several partitions into one order.
#
# Live, records are taken in the order in which the source returns them. That order is journalled with each batch, and
# so
# is every flush. After a restart the journalled runs are taken first, in the same order, so that several partitions
# replay as exactly as one; at a journalled flush nothing more is taken until the caller has repeated it.
#
# A journalled record may never come again: compaction removed it, `isolation.level` was changed, or the leader of its
# partition is down. What becomes of the order then:
#
#     1. A run ends with the offset that its last record had, whether all of its records came or not. Whatever comes of
#        the partition at or after that offset, or shows that the source has passed it, ends the run.
#     2. The order is dropped when records of the partition are in a gap, and when it holds up the others for too long:
#        `MAX_WAITING_RECORDS`, `MAX_WAITING_BYTES`, `MAX_SILENCE_S`.
#
# No record is lost by either, and both are logged.


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


GivenUp = Mapping[RecordId, tuple[Reason, str]]
"""Records that become dead letters without being decoded, with the reason and the message."""


def _unguarded(record: RecordId) -> AbstractContextManager[None]:
    del record
    return nullcontext()


class FlushReason(StrEnum):
    """Why a flush is due."""

    JOURNAL = "journal"
    """A process before this one flushed here."""
    END = "end"
    """The source is exhausted."""
    LINGER = "linger"
    """No record came for `stream.linger_s`."""


class DeadLetterWriter:
    """Sends each dead letter once.

    `known` are the records of dead letters that are in the sink already, although these records will be read again:
    those that the process before wrote after its last snapshot, and those that a snapshot lists because decoding runs
    ahead of training.
    """

    def __init__(self, sink: DeadLetters, known: Iterable[RecordId] = ()) -> None:
        self.sink = sink
        self._known = {RecordId(*record) for record in known}

    def send(self, record: Record, reason: Reason, message: str) -> None:
        """Send a record to the sink and log it; the payload is never logged.

        Raises:
            DeadLetterError: the sink does not accept it; the daemon must not go on.
        """
        if record.id not in self._known:
            self.sink.send(DeadLetter(record, reason, message))
            self._known.add(record.id)
        _log.warning(
            Event.RECORD_DEAD_LETTERED, origin=str(record.origin), offset=record.offset, reason=reason, message=message
        )

    def ahead_of(self, position: Position) -> list[RecordId]:
        """Return the dead-lettered records at or after `position`: a snapshot stores them beside the sink's mark.

        Those before it are forgotten, because they are never read again.
        """
        self._known = {record for record in self._known if record.offset >= position.get(record.origin, 0)}
        return sorted(self._known)


class Intake:
    """Returns one batch after another."""

    def __init__(
        self,
        merger: Merger,
        decoder: Decoder,
        batcher: Batcher,
        dead_letters: DeadLetterWriter,
        *,
        max_records: int,
        given_up: GivenUp = MappingProxyType({}),
        decoding: Callable[[RecordId], AbstractContextManager[None]] = _unguarded,
        ahead: Executor | None = None,
        linger_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect the parts.

        Args:
            merger: the records, in order.
            decoder: decodes each record.
            batcher: collects them into batches.
            dead_letters: receives the unusable ones.
            max_records: maximum number of records read from the source at a time.
            given_up: records that become dead letters without being decoded.
            decoding: the context manager in which each record is decoded.
            ahead: decodes in the background; without it records are decoded when a batch is requested.
            linger_s: time without a record after which a flush is due; never if None.
            clock: monotonic, in seconds.
        """
        self._merger = merger
        self._decoder = decoder
        self._batcher = batcher
        self._dead_letters = dead_letters
        self._max_records = max_records
        self._given_up = given_up
        self._decoding = decoding
        self._closed: deque[Batch] = deque()
        self._executor = ahead
        self._pending: deque[tuple[Record, Future[Example | RecordError]]] = deque()
        self._linger = Linger(linger_s, clock)

    def next_batch(self, *, timeout_s: float) -> Batch | None:
        """Return the next batch; None while the records that arrived within `timeout_s` do not fill one."""
        if self._executor is not None:
            self._decode_ahead(self._executor, 0.0 if self._closed or self._pending else timeout_s)
        elif not self._closed:
            self._fill((record, self._decode(record)) for record in self._take(self._max_records, timeout_s))
        return self._closed.popleft() if self._closed else None

    @property
    def flush_due(self) -> FlushReason | None:
        """Why what was read should not wait for more records; None while it should, or while a batch is ready."""
        if self._closed or self._pending:
            return None
        if self._merger.at_flush:
            return FlushReason.JOURNAL
        if self._merger.exhausted:
            return FlushReason.END
        return FlushReason.LINGER if self._linger.expired else None

    @property
    def open_runs(self) -> tuple[PartitionRun, ...]:
        """The records of the batch that `flush` would return; empty if there is none."""
        return self._batcher.open_runs

    def flush(self) -> list[Batch]:
        """Close the open batch and return it; empty if there is none."""
        self._merger.pass_flush()
        self._linger.restart()
        return self._batcher.flush()

    def postpone_flush(self) -> None:
        """Wait for the linger once more."""
        self._linger.restart()

    def _take(self, max_records: int, timeout_s: float) -> list[Record]:
        records = list(self._merger.take(max_records=max_records, timeout_s=timeout_s))
        if self._merger.follows_journal:  # what is to be read again is in the log: the source is slow, not quiet
            self._linger.restart()
        else:
            self._linger.observe_poll(len(records))
        return records

    def _decode_ahead(self, executor: Executor, timeout_s: float) -> None:
        """Submit the available records for decoding, and batch decoded ones until a batch is full."""
        capacity = self._max_records - len(self._pending)
        if capacity > 0:
            for record in self._take(capacity, timeout_s):
                self._pending.append((record, executor.submit(self._decode, record)))
        while self._pending and not self._closed:
            record, outcome = self._pending.popleft()
            self._fill([(record, outcome.result())])

    def _decode(self, record: Record) -> Example | RecordError:
        try:
            if record.id in self._given_up:
                raise RecordError(*self._given_up[record.id])
            with self._decoding(record.id):
                return self._decoder.decode(record)
        except RecordError as error:
            return error

    def _fill(self, decoded: Iterable[tuple[Record, Example | RecordError]]) -> None:
        for record, outcome in decoded:
            if isinstance(outcome, RecordError):
                self._dead_letters.send(record, outcome.reason, str(outcome))
                self._closed.extend(self._batcher.add_dead_lettered(record, outcome.reason, str(outcome)))
            else:
                self._closed.extend(self._batcher.add(record, outcome))


# A stream without the records that an operator skips.
#
# What comes after this reader (merging, batches, shift detection, training) cannot tell the stream from one that never
# had those records, so the outcome is the same, bit for bit. They become dead letters here, and the position moves past
# them as past a gap: once every record before them is accounted for.


_MESSAGE = "an operator rolled back and skipped offsets {range}"


class SkippingReader:
    """A positioned source without the records in some ranges."""

    def __init__(
        self,
        source: RecordReader,
        position: Position,
        skipped: Sequence[OffsetRange],
        dead_letters: DeadLetterWriter,
    ) -> None:
        """`position` is where `source` stands."""
        self._source = source
        self._ranges = skipped
        self._dead_letters = dead_letters
        self._begins: dict[TopicPartition, int] = dict(position)
        self._next: dict[TopicPartition, int] = dict(position)
        self._passed: dict[TopicPartition, deque[PartitionRun]] = defaultdict(deque)

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """What the source returns, without skipped records.

        Raises:
            SourceError: see `RecordReader`.
            DeadLetterError: the sink does not accept a skipped record.
        """
        records = self._source.poll(max_records=max_records, timeout_s=timeout_s)
        if not self._ranges:
            return records
        return [record for record in records if not self._skip(record)]

    @property
    def gaps(self) -> Sequence[Gap]:
        """Those of the source; skipped records are none."""
        return self._source.gaps

    @property
    def reached(self) -> Mapping[TopicPartition, int]:
        """That of the source."""
        return self._source.reached

    @property
    def exhausted(self) -> bool:
        """Whether the source is."""
        return self._source.exhausted

    def take_passed(self, position: Position) -> list[PartitionRun]:
        """Return the skipped records that directly follow `position`, each run once, in order per partition."""
        taken = []
        for origin, runs in self._passed.items():
            reached = position.get(origin, self._begins[origin])
            while runs and runs[0].first_offset <= reached:
                taken.append(runs.popleft())
                reached = max(reached, taken[-1].next_offset)
        return taken

    def _skip(self, record: Record) -> bool:
        """Note that the record was read; set it aside if it is to be skipped."""
        origin, offset = record.id
        self._begins.setdefault(origin, offset)
        expected = self._next.get(origin, offset)
        self._next[origin] = offset + 1
        within = next((each for each in self._ranges if record.id in each), None)
        if within is None:
            return False
        self._dead_letters.send(record, Reason.SKIPPED, _MESSAGE.format(range=within))
        runs = self._passed[origin]
        if runs and runs[-1].next_offset == expected:
            runs[-1] = runs[-1]._replace(next_offset=offset + 1, num_records=runs[-1].num_records + 1)
        else:
            runs.append(PartitionRun(origin.topic, origin.partition, expected, offset + 1, 1))
        return True
