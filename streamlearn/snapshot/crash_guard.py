"""A crash guard: it finds the record that crashes the process, and gives it up after three crashes.

    STATE/in_progress    two slots: the record being decoded, and the batch being trained on
    STATE/crashes.json   consecutive crashes with the same cause, and the records that were given up

A record that crashes the process (a segmentation fault in a decoder, memory that runs out) would crash every restart
too. Each record or batch is therefore written to its slot before the work and cleared after it. A filled slot at
start-up shows what the previous process was working on when it crashed:

    1. After the first and second crash the same work is retried: the crash may have had another cause.
    2. After two crashes a batch is trained record by record. That needs less memory and shows which record it is.
    3. After the third crash the record is given up, or the whole batch if no single record can be blamed: it becomes a
       dead letter without being processed.

Slots are written without fsync: what a process wrote outlives it, and after a power loss no record is to blame.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from streamlearn import codec
from streamlearn.errors import SnapshotError, StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.snapshot.files import Files
from streamlearn.stream.position import Position, RecordId, TopicPartition

MAX_CRASHES = 3
"""Consecutive crashes with the same cause after which the record is given up."""
_SLOT_BYTES = 1 << 16
_DECODE_SLOT, _TRAIN_SLOT = 0, 1
_EMPTY = b"\n"
_log = get_logger("snapshot")

Key = tuple[str, int, int]
"""A record in JSON: topic, partition, offset."""


@dataclass(frozen=True)
class _Work:
    """The content of a slot: a record that is being decoded, or a batch that is being trained on."""

    records: tuple[Key, ...]
    step: int | None = None
    """None in the slot for decoding."""
    at: int | None = None
    """Index of the record that is being trained on, where the batch is trained on record by record."""


@dataclass(frozen=True)
class _Crashes:
    """Consecutive crashes during the same work."""

    work: _Work
    count: int = 1

    def is_same(self, work: _Work) -> bool:
        return (self.work.step, self.work.records) == (work.step, work.records)


@dataclass
class _CrashHistory:
    """The content of crashes.json."""

    decode: _Crashes | None = None
    train: _Crashes | None = None
    given_up: list[Key] = field(default_factory=list)

    def add(self, decode: _Work | None, train: _Work | None) -> None:
        """Count a crash that left this work in the slots. What reached the maximum is given up."""
        blamed: list[Key] = []
        if decode is not None:
            self.decode, suspects = _count(self.decode, decode, "decoding")
            blamed += suspects
        if train is not None:
            self.train, suspects = _count(self.train, train, f"training step {train.step}")
            blamed += suspects
        self.decode = None if self.decode is not None and self.decode.count == MAX_CRASHES else self.decode
        self.train = None if self.train is not None and self.train.count == MAX_CRASHES else self.train
        self.given_up += [key for key in blamed if key not in self.given_up]


def _count(before: _Crashes | None, work: _Work, during: str) -> tuple[_Crashes, Sequence[Key]]:
    """The crashes with one more, and the records to give up for it."""
    repeated = before is not None and before.is_same(work)
    crashes = _Crashes(work, before.count + 1 if before is not None and repeated else 1)
    suspects = work.records if work.at is None else work.records[work.at : work.at + 1]
    given_up = crashes.count >= MAX_CRASHES
    _log.warning(Event.CRASH_DETECTED, during=during, records=suspects[:8], crashes=crashes.count, given_up=given_up)
    return crashes, suspects if given_up else ()


class GuardedBatch:
    """The batch that is being trained on."""

    def __init__(self, guard: "CrashGuard", work: _Work, *, one_by_one: bool) -> None:
        self.one_by_one = one_by_one
        """Whether this batch crashed before: train its records one at a time and call `on_record` before each."""
        self._guard, self._work = guard, work

    @property
    def parts(self) -> int:
        """Number of parts to train it in."""
        return len(self._work.records) if self.one_by_one else 1

    def on_record(self, number: int) -> None:
        """Note that the batch's record `number` is next."""
        self._guard.write(_TRAIN_SLOT, replace(self._work, at=number))


class CrashGuard:
    """The slots and the crash history. `decoding` may be called from another thread than the rest."""

    def __init__(self, state: Path, files: Files | None = None) -> None:
        """Open the files, and count the crash of the previous process if there was one.

        Raises:
            SnapshotError: the files cannot be read or written.
        """
        self._files = files if files is not None else Files()
        self._path, self._history_path = state / "in_progress", state / "crashes.json"
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self._descriptor, 0, 2 * _SLOT_BYTES)  # later writes work on a full disk too
        except OSError as error:
            raise _not_writable(self._path, error) from error
        self._history = self._read_history()
        self._count_crash()

    @property
    def given_up(self) -> frozenset[RecordId]:
        """Records that crashed the process `MAX_CRASHES` times."""
        return frozenset(
            RecordId(TopicPartition(topic, partition), offset) for topic, partition, offset in self._history.given_up
        )

    @contextmanager
    def decoding(self, record: RecordId) -> Iterator[None]:
        """Guard the decoding of a record. Any error but a StreamlearnError leaves the slot filled: it is a crash."""
        self.write(_DECODE_SLOT, _Work((_key(record),)))
        try:
            yield
        except StreamlearnError:
            self._clear(_DECODE_SLOT)
            raise
        self._clear(_DECODE_SLOT)

    @contextmanager
    def training(self, step: int, records: Sequence[RecordId]) -> Iterator[GuardedBatch]:
        """Guard the training of `step`'s batch. Errors are treated as in `decoding`."""
        batch = _Work(tuple(map(_key, records)), step)
        last = self._history.train
        suspected = last is not None and last.count >= MAX_CRASHES - 1 and last.is_same(batch)
        self.write(_TRAIN_SLOT, batch)
        try:
            yield GuardedBatch(self, batch, one_by_one=suspected)
        except StreamlearnError:
            self._clear(_TRAIN_SLOT)
            raise
        self._clear(_TRAIN_SLOT)

    def passed(self, position: Position) -> None:
        """Forget the given-up records before `position`: a snapshot covers them and they will not be read again.

        Raises:
            SnapshotError: the file cannot be written.
        """
        left = [key for key in self._history.given_up if key[2] >= position.get(TopicPartition(*key[:2]), 0)]
        if left != self._history.given_up:
            self._history.given_up = left
            self._write_history()

    def forget(self) -> None:
        """Clear the crash history, for a new run.

        Raises:
            SnapshotError: the file cannot be written.
        """
        self._history = _CrashHistory()
        self._write_history()

    def write(self, slot: int, work: _Work) -> None:
        """Fill a slot. A batch too large for it leaves it empty: a crash is then not attributed to any record."""
        data = _to_line(work)
        self._write(slot, data if len(data) <= _SLOT_BYTES else _EMPTY)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _clear(self, slot: int) -> None:
        self._write(slot, _EMPTY)

    def _write(self, slot: int, data: bytes) -> None:
        try:
            os.pwrite(self._descriptor, data, slot * _SLOT_BYTES)
        except OSError as error:
            raise _not_writable(self._path, error) from error

    def _read(self, slot: int) -> _Work | None:
        """What the previous process left in a slot; None for an empty slot or an incomplete write."""
        line, _, _ = os.pread(self._descriptor, _SLOT_BYTES, slot * _SLOT_BYTES).partition(b"\n")
        try:
            return codec.load(_Work, {}, orjson.loads(line))
        except ValueError:
            return None

    def _count_crash(self) -> None:
        """Add filled slots to the history, give up what reached the maximum, and clear the slots."""
        decode, train = self._read(_DECODE_SLOT), self._read(_TRAIN_SLOT)
        if decode is not None or train is not None:
            self._history.add(decode, train)
            self._write_history()
            self._clear(_DECODE_SLOT)
            self._clear(_TRAIN_SLOT)

    def _read_history(self) -> _CrashHistory:
        try:
            return codec.load(_CrashHistory, {}, orjson.loads(self._history_path.read_bytes()))
        except FileNotFoundError:
            return _CrashHistory()
        except OSError as error:
            raise SnapshotError(f"{self._history_path}: must be readable, found: {error.strerror}") from error
        except ValueError as error:
            raise SnapshotError(
                f"{self._history_path}: expected a crash history, found: {error!r}. Remove the file; records that "
                f"crash the process are found again after {MAX_CRASHES} crashes"
            ) from error

    def _write_history(self) -> None:
        try:
            self._files.replace(self._history_path, _to_line(self._history))
        except OSError as error:
            raise _not_writable(self._history_path, error) from error


def _to_line(value: _Work | _CrashHistory) -> bytes:
    return orjson.dumps(codec.dump_json(value), option=orjson.OPT_APPEND_NEWLINE)


def _not_writable(path: Path, error: OSError) -> SnapshotError:
    return SnapshotError(f"{path}: must be writable, found: {error.strerror}; check the disk and the permissions")


def _key(record: RecordId) -> Key:
    return record.origin.topic, record.origin.partition, record.offset
