"""The intake: reads records from a source, decodes them, and forms batches; unusable records become dead letters.

Only this module decides what happens to a record: it ends up in a batch's `records` or in its `dead_lettered`.

If records hold images and a core is free, they are decoded ahead of time in another thread while the learner works.
The order of the stream does not change.

A flush closes the open batch, and nothing that was read waits for more records. It is due when the stream ends, when no
record came for the linger, and wherever the journal holds one.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from types import MappingProxyType

from streamlearn.errors import Reason, RecordError
from streamlearn.events import Event, get_logger
from streamlearn.stream.batch import Batch, Batcher, PartitionRun
from streamlearn.stream.decode import Decoder, Example
from streamlearn.stream.linger import Linger
from streamlearn.stream.merge import Merger
from streamlearn.stream.record import Position, Record, RecordId
from streamlearn.stream.source import DeadLetter, DeadLetters

_log = get_logger("stream")

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
