"""What the daemon has in hand, written down first, so that the death of the process says what it died of.

    STATE/in-hand        two slots: the record that is being decoded, the batch that is being trained on
    STATE/deaths.json    how often in a row a process died of the same, and which records are given up

A record that kills (a decoder's segmentation fault, memory that is not there) would otherwise kill every process that
comes after. A daemon that starts and finds a slot filled knows that the one before died there:

    1. the first two times it does the same again: a death may have had any other reason;
    2. then a batch is trained record by record, which takes less memory and finds out which one it is;
    3. of what killed for the third time the record is given up, or the batch where no single record is to blame: it
       becomes a dead letter without being looked at.

Slots are written without fsync: what a process wrote outlives it, and after a power loss there is nobody to blame.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from streamlearn.errors import SnapshotError, StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.snapshot.files import Files
from streamlearn.stream.record import Position, RecordId, TopicPartition

DEATHS = 3
"""So many in a row of the same, and it is given up."""
_SLOT = 1 << 16
_DECODE, _TRAIN = 0, 1
_EMPTY = b"\n"
_log = get_logger("snapshot")

Key = tuple[str, int, int]
"""A record in JSON: topic, partition, offset."""


@dataclass
class _Tally:
    """The deaths file."""

    decode: dict[str, Any] = field(default_factory=dict)
    """{"record": key, "deaths": n}, or nothing."""
    train: dict[str, Any] = field(default_factory=dict)
    """{"step": n, "records": keys, "deaths": n}, or nothing."""
    given_up: list[Key] = field(default_factory=list)


class GuardedBatch:
    """A batch in hand."""

    def __init__(self, slots: "CrashGuard", batch: dict[str, Any], *, one_by_one: bool) -> None:
        self.one_by_one = one_by_one
        """Whether it killed before, so that its records must be taken one at a time, each after `on_record`."""
        self._slots, self._batch = slots, batch

    def on_record(self, number: int) -> None:
        """The batch's record `number` is next."""
        self._slots.write(_TRAIN, {**self._batch, "at": number})


class CrashGuard:
    """The two files. `decoding` may be called from a thread of its own."""

    def __init__(self, state: Path, files: Files | None = None) -> None:
        """Look what a dead process left, and count it.

        Raises:
            SnapshotError: the files cannot be read or written.
        """
        self._files = files if files is not None else Files()
        self._path, self._deaths = state / "in-hand", state / "deaths.json"
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self._descriptor, 0, 2 * _SLOT)  # a disk that fills up later must not matter
        except OSError as error:
            raise SnapshotError(f"{self._path}: must be writable, found: {error.strerror}") from error
        self._tally = self._read_tally()
        self._count()

    @property
    def given_up(self) -> frozenset[RecordId]:
        """Records that killed the process too often."""
        return frozenset(RecordId(TopicPartition(topic, part), offset) for topic, part, offset in self._tally.given_up)

    @contextmanager
    def decoding(self, record: RecordId) -> Iterator[None]:
        """The record is decoded inside. Any error but ours leaves it in hand: it will end the process."""
        self.write(_DECODE, {"record": _key(record)})
        try:
            yield
        except StreamlearnError:
            self._clear(_DECODE)
            raise
        self._clear(_DECODE)

    @contextmanager
    def training(self, step: int, records: Sequence[RecordId]) -> Iterator[GuardedBatch]:
        """The batch of `step` is trained on inside; as `decoding` otherwise."""
        batch = {"step": step, "records": [_key(record) for record in records]}
        known = self._tally.train
        suspected = known.get("deaths", 0) >= DEATHS - 1 and _same(known, batch)
        self.write(_TRAIN, batch)
        try:
            yield GuardedBatch(self, batch, one_by_one=suspected)
        except StreamlearnError:
            self._clear(_TRAIN)
            raise
        self._clear(_TRAIN)

    def passed(self, position: Position) -> None:
        """A snapshot covers every record before `position`: those among the given up will not be read again.

        Raises:
            SnapshotError: the file cannot be written.
        """
        left = [key for key in self._tally.given_up if key[2] >= position.get(TopicPartition(*key[:2]), 0)]
        if left != self._tally.given_up:
            self._tally.given_up = left
            self._write_tally()

    def forget(self) -> None:
        """A new run begins: nothing is known of it.

        Raises:
            SnapshotError: the file cannot be written.
        """
        self._tally = _Tally()
        self._write_tally()

    def write(self, slot: int, what: dict[str, Any]) -> None:
        """Fill a slot. A batch too long for it is not written down: then nobody is blamed."""
        data = orjson.dumps(what, option=orjson.OPT_APPEND_NEWLINE)
        self._write(slot, data if len(data) <= _SLOT else _EMPTY)

    def close(self) -> None:
        """Release the file. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _clear(self, slot: int) -> None:
        self._write(slot, _EMPTY)

    def _write(self, slot: int, data: bytes) -> None:
        try:
            os.pwrite(self._descriptor, data, slot * _SLOT)
        except OSError as error:
            raise SnapshotError(f"{self._path}: must be writable, found: {error.strerror}") from error

    def _left(self, slot: int) -> dict[str, Any] | None:
        """What a dead process had in hand; None for nothing, or for what it died in the middle of writing."""
        line, _, _ = os.pread(self._descriptor, _SLOT, slot * _SLOT).partition(b"\n")
        try:
            found = orjson.loads(line)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _count(self) -> None:
        """Enter what is left in the slots, and give up what is there for the third time."""
        decode, train = self._left(_DECODE), self._left(_TRAIN)
        if decode is None and train is None:
            return
        tally = self._tally
        blamed: list[Key] = []
        if decode is not None:
            again = tally.decode.get("record") == decode["record"]
            tally.decode = {"record": decode["record"], "deaths": tally.decode["deaths"] + 1 if again else 1}
            blamed += self._judge(tally.decode, [decode["record"]], "decoding")
        if train is not None:
            again = _same(tally.train, train)
            tally.train = {**train, "deaths": tally.train["deaths"] + 1 if again else 1}
            at = train.get("at")
            suspects = train["records"] if at is None else [train["records"][at]]
            blamed += self._judge(tally.train, suspects, f"training step {train['step']}")
        tally.decode = {} if tally.decode.get("deaths") == DEATHS else tally.decode
        tally.train = {} if tally.train.get("deaths") == DEATHS else tally.train
        tally.given_up += [key for key in blamed if key not in tally.given_up]
        self._write_tally()
        self._clear(_DECODE)
        self._clear(_TRAIN)

    def _judge(self, entry: dict[str, Any], suspects: list[Key], doing: str) -> list[Key]:
        deaths = entry["deaths"]
        given_up = deaths >= DEATHS
        _log.warning(Event.CRASH_DETECTED, doing=doing, records=suspects[:8], deaths=deaths, given_up=given_up)
        return suspects if given_up else []

    def _read_tally(self) -> _Tally:
        try:
            found = orjson.loads(self._deaths.read_bytes())
            given_up = [(str(topic), int(part), int(offset)) for topic, part, offset in found["given_up"]]
            return _Tally(dict(found["decode"]), dict(found["train"]), given_up)
        except FileNotFoundError:
            return _Tally()
        except OSError as error:
            raise SnapshotError(f"{self._deaths}: must be readable, found: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise SnapshotError(
                f"{self._deaths}: must be a tally of deaths, found: {error!r}. Remove the file; records that kill the "
                f"process will be found again after {DEATHS} deaths"
            ) from error

    def _write_tally(self) -> None:
        tally = self._tally
        data = {"decode": tally.decode, "train": tally.train, "given_up": tally.given_up}
        fresh = self._deaths.with_name(f"{self._deaths.name}.new")
        try:
            if fresh.exists():
                self._files.remove(fresh)
            self._files.write(fresh, orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE))
            self._files.sync(fresh)
            self._files.rename(fresh, self._deaths)
            self._files.sync(self._deaths.parent)
        except OSError as error:
            raise SnapshotError(f"{self._deaths}: must be writable, found: {error.strerror}") from error


def _key(record: RecordId) -> list[Any]:
    return [record.origin.topic, record.origin.partition, record.offset]


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(name) == other[name] for name in ("step", "records"))
