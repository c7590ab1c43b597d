"""A Python iterable as a source: each record is a dict, and the offset counts the records from 0.

One partition goes on over several iterables, one after another. It cannot be read again: a run that continues from a
snapshot is given the records that follow its position.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from streamlearn.errors import SourceError, UsageError
from streamlearn.stream.position import Gap, OffsetRange, Position, TopicPartition
from streamlearn.stream.record import Record

TOPIC = "records"
ORIGIN = TopicPartition(TOPIC, 0)


class IterableSource:
    """Reads what `feed` gave it last; see `Source`."""

    gaps: Sequence[Gap] = ()
    identity: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.exhausted = True
        self._error: Exception | None = None
        self.records: Iterator[Mapping[str, Any]] = iter(())
        """What is being read."""
        self._next = 0

    def feed(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Read these records next. Of those before, neither the unread ones nor an error that ended them follow.

        The iterator that is being read continues where it was, and its error is still raised.

        Raises:
            TypeError: see `iterate`.
        """
        iterator = iterate(records)
        if iterator is not self.records:
            self._error = None
        self.records, self.exhausted = iterator, False

    def seek(
        self,
        position: Position,
        identity: Mapping[str, str] | None = None,
        skipped: Sequence[OffsetRange] = (),
    ) -> Position:
        """Begin at the position; see `Source.seek`.

        Raises:
            SourceError: it lies before what was read already, as after a rollback.
        """
        del identity, skipped
        begin = position.get(ORIGIN, 0)
        if begin < self._next:
            raise SourceError(
                f"the records from {begin} on must be read again, and those up to {self._next} came from an iterable, "
                f"which cannot be: open the learner again and pass it the records from {begin} on"
            )
        self._next = begin
        return Position({ORIGIN: self._next})

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """Take as many records as wanted; waits for the iterable as long as it takes.

        An error of the iterable is raised once the records before it have been returned.

        Raises:
            UsageError: something in the iterable is no dict, or JSON cannot hold it.
        """
        del timeout_s
        error, self._error = self._error, None
        if error is not None:
            raise error
        polled: list[Record] = []
        while len(polled) < max_records and not self.exhausted:
            try:
                polled.append(self._record(next(self.records)))
            except StopIteration:
                self.exhausted = True
            except Exception as error:
                if not polled:
                    raise
                self._error = error
                break
        return polled

    def _record(self, value: object) -> Record:
        record = Record(ORIGIN, self._next, to_json(value, f"record {self._next}"))
        self._next += 1
        return record

    @property
    def reached(self) -> Mapping[TopicPartition, int]:
        return {ORIGIN: self._next}

    def commit(self, position: Position, note: str) -> None:
        """Do nothing: there is nobody to tell."""

    def lag(self, position: Position) -> Mapping[TopicPartition, int]:
        """Nothing: how many records follow is unknown."""
        del position
        return {}

    def close(self) -> None:
        self.records = iter(())


def iterate(records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The iterator over some records.

    Raises:
        TypeError: they are a single record, a text, or no iterable.
    """
    if isinstance(records, Mapping | str | bytes):
        raise TypeError(
            f"expected an iterable of records, found {type(records).__name__}; put a single record into a list"
        )
    return iter(records)


def to_json(value: object, name: str) -> bytes:
    """The JSON text of a record; `name` is what a message calls it.

    Raises:
        UsageError: it is no dict, or JSON cannot hold it.
    """
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a dict of fields, found {type(value).__name__}")
    try:
        return orjson.dumps(dict(value), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise UsageError(f"{name} must hold what JSON can (images in base64): {error}; convert it first") from error
