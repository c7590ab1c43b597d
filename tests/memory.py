"""A source and a dead-letter sink in memory.

>>> source = MemorySource(records_from([b'{"text": "a"}', b'{"text": "b"}']))
>>> source.seek(Position())
Position(offsets={TopicPartition(topic='memory', partition=0): 0})
>>> [record.offset for record in source.poll(max_records=8, timeout_s=0.0)]
[0, 1]
>>> source.exhausted
True
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streamlearn.errors import OffsetGapError
from streamlearn.stream.position import Gap, OffsetRange, Position, RecordId, TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import DeadLetter


def records_from(values: Iterable[bytes], topic: str = "memory", partition: int = 0, start: int = 0) -> list[Record]:
    origin = TopicPartition(topic, partition)
    return [Record(origin, offset, value) for offset, value in enumerate(values, start)]


def after(position: Position, records: Iterable[Record]) -> Position:
    return Position({**position, **{record.origin: record.offset + 1 for record in records}})


class MemorySource:
    """Records given at once or appended later, returned in the order in which they were given.

    An endless source waits for `append`, which may come from another thread; a finite one is exhausted after the last
    record.
    """

    def __init__(self, records: Iterable[Record] = (), *, endless: bool = False) -> None:
        self.commits: list[tuple[Position, str]] = []
        self._endless = endless
        self._log: list[Record] = []
        self._ends: dict[TopicPartition, int] = {}
        self._cursor = 0
        self._start: Mapping[TopicPartition, int] = {}
        self._changed = threading.Condition()
        self.append(*records)

    def append(self, *records: Record) -> None:
        """Append records to their logs; offsets must increase within a partition and may have gaps."""
        with self._changed:
            for record in records:
                assert record.offset >= self._ends.get(record.origin, 0), (
                    f"{record.origin} is already past {record.offset}"
                )
                self._log.append(record)
                self._ends[record.origin] = record.offset + 1
            self._changed.notify_all()

    def seek(
        self,
        position: Position,
        identity: Mapping[str, str] | None = None,
        skipped: Sequence[OffsetRange] = (),
    ) -> Position:
        """Go to `position`; partitions that it does not name begin at 0.

        Raises:
            OffsetGapError: a named offset lies past the end of its log.
        """
        del identity  # a memory source has none
        for origin, offset in position.items():
            end = self._ends.get(origin, 0)
            if offset > end:
                raise OffsetGapError(
                    f"the log of {origin} must reach offset {offset}, found its end at {end}: start over with --fresh"
                )
        self._start = {**dict.fromkeys(self._ends, 0), **position}
        self._cursor = 0
        return Position(dict(self._start))

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """Return the next records; an endless source waits up to `timeout_s` for the first."""
        with self._changed:
            if self._endless:
                self._changed.wait_for(self._has_next, timeout_s)
            records: list[Record] = []
            while len(records) < max_records and self._has_next():
                records.append(self._log[self._cursor])
                self._cursor += 1
            return records

    def commit(self, position: Position, note: str) -> None:
        self.commits.append((position, note))

    def lag(self, position: Position) -> Mapping[TopicPartition, int]:
        left = dict.fromkeys(self._ends, 0)
        for record in self._log:
            left[record.origin] += record.offset >= position.get(record.origin, 0)
        return left

    @property
    def identity(self) -> Mapping[str, str]:
        return {}

    @property
    def gaps(self) -> Sequence[Gap]:
        return ()

    @property
    def reached(self) -> Mapping[TopicPartition, int]:
        """The offset after the last record that was returned, per partition."""
        with self._changed:
            return {record.origin: record.offset + 1 for record in self._log[: self._cursor]}

    @property
    def exhausted(self) -> bool:
        with self._changed:
            return not self._endless and not self._has_next()

    def close(self) -> None:
        """Nothing to release."""

    def _has_next(self) -> bool:
        """Move the cursor past records before the start; return whether a record is left."""
        while self._cursor < len(self._log):
            record = self._log[self._cursor]
            if record.offset >= self._start.get(record.origin, 0):
                return True
            self._cursor += 1
        return False


class MemoryDeadLetters:
    """Dead letters in a list.

    To simulate a restart, give the list to the next instance; dead letters that were not flushed are lost.
    """

    def __init__(self, flushed: list[DeadLetter] | None = None) -> None:
        self.flushed: list[DeadLetter] = flushed if flushed is not None else []
        self._unflushed: list[DeadLetter] = []

    def recall(self, mark: Mapping[str, Any] | None) -> frozenset[RecordId]:
        start = mark["letters"] if mark is not None else 0
        return frozenset(dead_letter.record.id for dead_letter in self.flushed[start:])

    def send(self, dead_letter: DeadLetter) -> None:
        self._unflushed.append(dead_letter)

    def flush(self) -> None:
        self.flushed += self._unflushed
        self._unflushed.clear()

    def mark(self) -> Mapping[str, Any]:
        return {"letters": len(self.flushed)}

    def close(self) -> None:
        """Nothing to release."""
