"""The intake: reads records from a source, decodes them, and forms batches; unusable records become dead letters.

Only this module decides what happens to a record: it ends up in a batch's `records` or in its `dead_lettered`.

If records hold images and a core is free, they are decoded ahead of time in another thread while the learner works.
The order of the stream does not change.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

from streamlearn.errors import Reason, RecordError
from streamlearn.events import Event, get_logger
from streamlearn.stream.batch import Batch, Batcher
from streamlearn.stream.decode import Decoder, Example
from streamlearn.stream.merge import Merger
from streamlearn.stream.record import Position, Record, RecordId
from streamlearn.stream.source import DeadLetter, DeadLetters

_log = get_logger("stream")

GivenUp = Mapping[RecordId, tuple[Reason, str]]
"""Records that become dead letters without being decoded, with the reason and the message."""


def _unguarded(record: RecordId) -> AbstractContextManager[None]:
    del record
    return nullcontext()


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

    def next_batch(self, *, timeout_s: float) -> Batch | None:
        """Return the next batch; None while the records that arrived within `timeout_s` do not fill one."""
        if self._executor is not None:
            self._decode_ahead(self._executor, 0.0 if self._closed or self._pending else timeout_s)
        elif not self._closed:
            records = self._merger.take(max_records=self._max_records, timeout_s=timeout_s)
            self._fill((record, self._decode(record)) for record in records)
        return self._closed.popleft() if self._closed else None

    def flush(self) -> list[Batch]:
        """Return the last, partly filled batch when the source is exhausted; empty if there is none."""
        return self._batcher.flush()

    def _decode_ahead(self, executor: Executor, timeout_s: float) -> None:
        """Submit the available records for decoding, and batch decoded ones until a batch is full."""
        capacity = self._max_records - len(self._pending)
        if capacity > 0:
            for record in self._merger.take(max_records=capacity, timeout_s=timeout_s):
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
                self._closed.extend(self._batcher.add_dead_lettered(record, outcome.reason))
            else:
                self._closed.extend(self._batcher.add(record, outcome))
