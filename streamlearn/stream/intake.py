"""The intake: reads records from a source, decodes them and forms batches; unusable records become dead letters.

Every record that is read ends in one of four places, decided here: the `records` of a batch, its `dead_lettered`, its
`ignored`, or the records that an operator skips, which leave the stream before it is batched. Every dead letter is sent
by `Intake.set_aside`.

Which records form a batch depends on their order and lengths, and on where the stream was flushed. A flush closes the
open batch, and nothing that was read waits for more records. It is due when the stream ends, when no record came for
`stream.linger_s`, and wherever the journal has one. Flushes are journalled, so a stream of one partition replays bit
for bit: the same records form the same batches after any number of restarts. Records of several partitions are taken
as they come, each once, and may form other batches after a restart.

If records hold images and a core is free, they are decoded ahead of time in another thread while the learner works.
The order of the stream does not change.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from streamlearn.errors import Reason, RecordError
from streamlearn.events import Event, get_logger
from streamlearn.settings import StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.position import OffsetRange, PartitionRun, Position, RecordId, TopicPartition
from streamlearn.stream.record import Batch, DeadLetteredRecord, Example, IgnoredRecord, Record
from streamlearn.stream.source import DeadLetter, DeadLetters, Source

MAX_DEAD_LETTERED = 1000
"""Maximum number of dead-lettered and ignored records per batch."""
_POLLED_BATCHES = 8  # records taken from the source at a time, in full batches

_log = get_logger("stream")


@dataclass
class Batcher:
    """Fills batches in record order.

    A batch is closed when it holds `batch_records` records or exactly `batch_tokens` tokens, or by the record that
    would exceed `batch_tokens`; that record starts the next batch. A batch is also closed after MAX_DEAD_LETTERED
    dead-lettered and ignored records, so that the position advances through a segment of them, and by `flush`.
    """

    settings: StreamSettings
    _records: list[Record] = field(default_factory=list)
    _examples: list[Example] = field(default_factory=list)
    _dead_lettered: list[DeadLetteredRecord] = field(default_factory=list)
    _ignored: list[IgnoredRecord] = field(default_factory=list)
    _order: list[RecordId] = field(default_factory=list)
    _tokens: int = 0

    def add(self, record: Record, example: Example) -> list[Batch]:
        """Add a decoded record; return the batches that it closes: none, one, or two."""
        closed = []
        if self._records and self._tokens + len(example.input_ids) > self.settings.batch_tokens:
            closed += self.flush()
        self._order.append(record.id)
        self._records.append(record)
        self._examples.append(example)
        self._tokens += len(example.input_ids)
        if len(self._records) == self.settings.batch_records or self._tokens == self.settings.batch_tokens:
            closed += self.flush()
        return closed

    def add_dead_lettered(self, record: Record, reason: Reason, message: str = "") -> list[Batch]:
        """Add a record that became a dead letter; return the batch if this closes it."""
        self._order.append(record.id)
        self._dead_lettered.append(DeadLetteredRecord(record.id, reason, message))
        return self._flush_if_long()

    def add_ignored(self, record: Record, reason: Reason) -> list[Batch]:
        """Add a record that is ignored; return the batch if this closes it."""
        self._order.append(record.id)
        self._ignored.append(IgnoredRecord(record.id, reason))
        return self._flush_if_long()

    @property
    def open_runs(self) -> tuple[PartitionRun, ...]:
        """The records of the open batch in the order in which they were read; empty if none is open."""
        return runs_of(self._order)

    def flush(self) -> list[Batch]:
        """Close the open batch, if there is one; it may hold only dead-lettered and ignored records."""
        if not self._order:
            return []
        batch = Batch(
            tuple(self._records),
            tuple(self._examples),
            tuple(self._dead_lettered),
            runs_of(self._order),
            tuple(self._ignored),
        )
        self._records, self._examples, self._tokens = [], [], 0
        self._dead_lettered, self._ignored, self._order = [], [], []
        return [batch]

    def _flush_if_long(self) -> list[Batch]:
        return self.flush() if len(self._dead_lettered) + len(self._ignored) == MAX_DEAD_LETTERED else []


def runs_of(records: Sequence[RecordId]) -> tuple[PartitionRun, ...]:
    """Group consecutive records of one partition into runs."""
    runs: list[PartitionRun] = []
    for origin, offset in records:
        last = runs[-1] if runs else None
        if last is not None and last.origin == origin:
            runs[-1] = last._replace(next_offset=offset + 1, num_records=last.num_records + 1)
        else:
            runs.append(PartitionRun(origin.topic, origin.partition, offset, offset + 1, 1))
    return tuple(runs)


class BatchEnd(NamedTuple):
    """Where an earlier process closed a batch of a stream of one partition."""

    last: RecordId
    flush: bool
    """Whether the stream was flushed after it."""


class FlushReason(StrEnum):
    """Why a flush is due."""

    JOURNAL = "journal"
    """A process before this one flushed here."""
    END = "end"
    """The source is exhausted."""
    LINGER = "linger"
    """No record came for `stream.linger_s`."""


GivenUp = Mapping[RecordId, tuple[Reason, str]]
"""Records that become dead letters without being decoded, with the reason and the message."""


class Intake:
    """Returns one batch after another, from where the source stands."""

    def __init__(
        self,
        source: Source,
        position: Position,
        decoder: Decoder,
        dead_letters: DeadLetters,
        settings: StreamSettings,
        *,
        known: Iterable[RecordId] = (),
        journalled: Iterable[BatchEnd] = (),
        skipped: Sequence[OffsetRange] = (),
        given_up: GivenUp = MappingProxyType({}),
        ignored: Collection[Reason] = (),
        decoding: Callable[[RecordId], AbstractContextManager[None]] = lambda _: nullcontext(),
        ahead: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect the parts.

        Args:
            source: The records.
            position: Where the source stands.
            decoder: Decodes each record.
            dead_letters: Receives the unusable ones.
            settings: Size of a batch, and the linger.
            known: Records to be read again whose dead letters are in the sink already: the process before wrote them
                after its last snapshot, or a snapshot lists them because decoding runs ahead of training.
            journalled: Batches that must be formed again.
            skipped: Records that an operator skips.
            given_up: Records that become dead letters without being decoded.
            ignored: Reasons of records that are counted as ignored instead of becoming dead letters.
            decoding: The context manager in which each record is decoded.
            ahead: Decodes in the background; without it records are decoded when a batch is requested.
            clock: Monotonic, in seconds; measures the linger.
        """
        self._source = source
        self._decoder = decoder
        self._sink = dead_letters
        self._known = {RecordId(*record) for record in known}
        self._settings = settings
        self._max_records = settings.batch_records * _POLLED_BATCHES
        self._filter = RecordFilter(position, skipped)
        self._journalled = deque(journalled)
        self._given_up = given_up
        self._ignored = ignored
        self._decoding = decoding
        self._executor = ahead
        self._clock = clock
        self._quiet_since: float | None = None
        """Time of the first of the polls that have returned nothing. Only polling counts: a step may take long."""
        self._waiting: deque[Record] = deque()
        """Records after a journalled flush."""
        self._pending: deque[tuple[Record, Future[Example | RecordError]]] = deque()
        """Records that are decoded ahead."""
        self._batcher = Batcher(settings)
        self._closed: deque[Batch] = deque()

    def next_batch(self, *, timeout_s: float) -> Batch | None:
        """Return the next batch; None while the records that arrived within `timeout_s` do not fill one.

        Raises:
            SourceError: the source cannot be read.
            DeadLetterError: the sink does not accept a dead letter; the daemon must not continue.
        """
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
        if self._at_journalled_flush():
            return FlushReason.JOURNAL
        if self._source.exhausted and not self._waiting:
            return FlushReason.END
        linger_s = self._settings.linger_s
        if linger_s is None or self._quiet_since is None or self._clock() - self._quiet_since < linger_s:
            return None
        return FlushReason.LINGER

    @property
    def open_runs(self) -> tuple[PartitionRun, ...]:
        """The records of the batch that `flush` would return; empty if there is none."""
        return self._batcher.open_runs

    def flush(self) -> list[Batch]:
        """Close the open batch and return it; empty if there is none."""
        if self._at_journalled_flush():
            self._journalled.popleft()
        self.postpone_flush()
        return self._batcher.flush()

    def postpone_flush(self) -> None:
        """Wait for the linger once more."""
        self._quiet_since = None

    def set_aside(self, record: Record, reason: Reason, message: str) -> None:
        """Make a record a dead letter, once, and log it; the payload is never logged.

        Raises:
            DeadLetterError: the sink does not accept it; the daemon must not continue.
        """
        if record.id not in self._known:
            self._sink.send(DeadLetter(record, reason, message))
            self._known.add(record.id)
        _log.warning(
            Event.RECORD_DEAD_LETTERED, origin=str(record.origin), offset=record.offset, reason=reason, message=message
        )

    def dead_letters_from(self, position: Position) -> list[RecordId]:
        """Return the dead letters at or after `position`, which a snapshot stores with the sink's mark.

        Those before it are forgotten, because they are never read again.
        """
        self._known = {record for record in self._known if record.offset >= position.get(record.origin, 0)}
        return sorted(self._known)

    def take_skipped(self, position: Position) -> list[PartitionRun]:
        """Return the skipped records that directly follow `position`, each run once, in order per partition."""
        return self._filter.take_skipped(position)

    def _take(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return the records that are ready, at most up to the next journalled flush."""
        if not self._waiting and not self._at_journalled_flush():
            self._waiting.extend(self._poll(max_records, timeout_s))
        records: list[Record] = []
        while self._waiting and len(records) < max_records and not self._at_journalled_flush():
            records.append(self._waiting.popleft())
        return records

    def _poll(self, max_records: int, timeout_s: float) -> list[Record]:
        polled = self._source.poll(max_records=max_records, timeout_s=timeout_s)
        if polled or self._journalled:  # what must be read again is in the log: the source is slow, not quiet
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = self._clock()
        records = []
        for record in polled:
            skipped_by = self._filter.observe(record)
            if skipped_by is None:
                records.append(record)
            else:
                message = f"an operator rolled back and skipped offsets {skipped_by}"
                self.set_aside(record, Reason.SKIPPED, message)
        return records

    def _at_journalled_flush(self) -> bool:
        """Whether the next thing in the journal is a flush, not a record."""
        while self._journalled and self._has_passed(self._journalled[0].last):
            if self._journalled[0].flush:
                return True
            self._journalled.popleft()
        return False

    def _has_passed(self, record: RecordId) -> bool:
        """Whether neither the record nor one before it in its partition is still to be taken."""
        origin, offset = record
        waiting = next((waiting.offset for waiting in self._waiting if waiting.origin == origin), None)
        if waiting is not None:
            return waiting > offset
        reached = max(self._filter.reached(origin), self._source.reached.get(origin, 0))
        return reached > offset or self._source.exhausted

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
            if isinstance(outcome, RecordError) and outcome.reason in self._ignored:
                self._closed.extend(self._batcher.add_ignored(record, outcome.reason))
            elif isinstance(outcome, RecordError):
                self.set_aside(record, outcome.reason, str(outcome))
                self._closed.extend(self._batcher.add_dead_lettered(record, outcome.reason, str(outcome)))
            else:
                self._closed.extend(self._batcher.add(record, outcome))


class RecordFilter:
    """Takes the records in some ranges out of a stream, and remembers them until the position can move past them.

    What comes after it (batches, shift detection, training) cannot tell the stream from one that never had those
    records, so the outcome is the same, bit for bit. The position moves past them as past a gap: once every record
    before them is accounted for.
    """

    def __init__(self, position: Position, ranges: Sequence[OffsetRange]) -> None:
        """`position` is where the stream begins."""
        self._ranges = ranges
        self._begins: dict[TopicPartition, int] = dict(position)
        self._next: dict[TopicPartition, int] = dict(position)
        self._skipped: dict[TopicPartition, deque[PartitionRun]] = defaultdict(deque)

    def observe(self, record: Record) -> OffsetRange | None:
        """Note that a record was read; return the range that it is skipped by, or None if it stays."""
        origin, offset = record.id
        self._begins.setdefault(origin, offset)
        expected = self._next.get(origin, offset)
        self._next[origin] = offset + 1
        within = next((skipped for skipped in self._ranges if record.id in skipped), None)
        if within is not None:
            runs = self._skipped[origin]
            if runs and runs[-1].next_offset == expected:
                runs[-1] = runs[-1]._replace(next_offset=offset + 1, num_records=runs[-1].num_records + 1)
            else:
                runs.append(PartitionRun(origin.topic, origin.partition, expected, offset + 1, 1))
        return within

    def reached(self, origin: TopicPartition) -> int:
        """The offset after the last record that was read; where the partition begins before the first."""
        return self._next.get(origin, 0)

    def take_skipped(self, position: Position) -> list[PartitionRun]:
        """Return the skipped records that directly follow `position`; see `Intake.take_skipped`."""
        taken = []
        for origin, runs in self._skipped.items():
            reached = position.get(origin, self._begins[origin])
            while runs and runs[0].first_offset <= reached:
                taken.append(runs.popleft())
                reached = max(reached, taken[-1].next_offset)
        return taken
