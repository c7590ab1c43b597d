"""From a source to batches: take, decode, set aside what cannot be used, batch.

The one place where a record's fate is decided: it is either in a batch's `records` or in its `rejected`.

Where records hold images and a core is free they are decoded ahead, in a thread of their own, while the learner is at
work; their order is the stream's all the same.
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
from streamlearn.stream.record import Position, Record, RecordId, TopicPartition
from streamlearn.stream.source import DeadLetter, DeadLetters

_log = get_logger("stream")

GivenUp = Mapping[RecordId, tuple[Reason, str]]
"""Records that are set aside without a look, and why."""


def _not_noted(record: RecordId) -> AbstractContextManager[None]:
    del record
    return nullcontext()


class DeadLetterWriter:
    """Sends dead letters, each once.

    `known` are letters that already stand in the sink although their records will be read again: those that a dead
    daemon wrote after its last snapshot, and those that a snapshot names because decoding runs ahead of training.
    """

    def __init__(self, sink: DeadLetters, known: Iterable[tuple[TopicPartition, int]] = ()) -> None:
        self.sink = sink
        self._known = {RecordId(*letter) for letter in known}

    def send(self, record: Record, reason: Reason, message: str) -> None:
        """Set a record aside and say so in the log; the payload is never logged.

        Raises:
            DeadLetterError: the sink does not take it; nothing may go on.
        """
        if record.id not in self._known:
            self.sink.send(DeadLetter(record, reason, message))
            self._known.add(record.id)
        _log.warning(
            Event.RECORD_DEAD_LETTERED, origin=str(record.origin), offset=record.offset, reason=reason, message=message
        )

    def ahead_of(self, position: Position) -> list[RecordId]:
        """Letters of records at or behind `position`: what a snapshot must remember beside the sink's mark.

        Those before it are forgotten; their records are never read again.
        """
        self._known = {letter for letter in self._known if letter.offset >= position.get(letter.origin, 0)}
        return sorted(self._known)


class Intake:
    """Hands out one batch after another."""

    def __init__(
        self,
        merger: Merger,
        decoder: Decoder,
        batcher: Batcher,
        rejects: DeadLetterWriter,
        *,
        max_records: int,
        given_up: GivenUp = MappingProxyType({}),
        decoding: Callable[[RecordId], AbstractContextManager[None]] = _not_noted,
        ahead: Executor | None = None,
    ) -> None:
        """`ahead` decodes in the background; without it records are decoded when a batch is asked for.

        A record is decoded inside `decoding`.
        """
        self._merger = merger
        self._decoder = decoder
        self._batcher = batcher
        self._rejects = rejects
        self._max_records = max_records
        self._given_up = given_up
        self._decoding = decoding
        self._closed: deque[Batch] = deque()
        self._ahead = ahead
        self._coming: deque[tuple[Record, Future[Example | RecordError]]] = deque()

    def next_batch(self, *, timeout_s: float) -> Batch | None:
        """The next batch; None when the records that came within `timeout_s` do not fill one yet."""
        if self._ahead is not None:
            self._look_ahead(self._ahead, 0.0 if self._closed or self._coming else timeout_s)
        elif not self._closed:
            records = self._merger.take(max_records=self._max_records, timeout_s=timeout_s)
            self._fill((record, self._fate_of(record)) for record in records)
        return self._closed.popleft() if self._closed else None

    def last_batches(self) -> list[Batch]:
        """What is left when the source is exhausted."""
        return self._batcher.flush()

    def _look_ahead(self, executor: Executor, timeout_s: float) -> None:
        """Have what is there decoded, and take over as much of it as a batch needs."""
        room = self._max_records - len(self._coming)
        if room > 0:
            for record in self._merger.take(max_records=room, timeout_s=timeout_s):
                self._coming.append((record, executor.submit(self._fate_of, record)))
        while self._coming and not self._closed:
            record, fate = self._coming.popleft()
            self._fill([(record, fate.result())])

    def _fate_of(self, record: Record) -> Example | RecordError:
        try:
            if record.id in self._given_up:
                raise RecordError(*self._given_up[record.id])
            with self._decoding(record.id):
                return self._decoder.decode(record)
        except RecordError as error:
            return error

    def _fill(self, decided: Iterable[tuple[Record, Example | RecordError]]) -> None:
        for record, fate in decided:
            if isinstance(fate, RecordError):
                self._rejects.send(record, fate.reason, str(fate))
                self._closed.extend(self._batcher.reject(record, fate.reason))
            else:
                self._closed.extend(self._batcher.add(record, fate))
