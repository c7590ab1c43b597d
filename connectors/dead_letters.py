"""Dead letters in a JSONL file, one per line, bytes in base64; and what a file and a topic have in common.

A dead letter is identified by headers with Kafka Connect's names under our prefix. A record's own headers with that
prefix are removed, so that a record cannot forge them.
"""

import base64
import binascii
import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

import orjson

from streamlearn.errors import DeadLetterError, Reason
from streamlearn.stream.position import RecordId, TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import DeadLetter

MAX_BYTES = 64 << 20
"""Maximum size of keys, values and messages in bytes; beyond it the daemon stops rather than drop a dead letter."""
_OVERHEAD_BYTES = 500  # headers and objects of one dead letter, approximately


class DeadLetterBacklog:
    """Dead letters that the sink has not accepted yet, in order and in memory.

    It needs no file: no snapshot covers their records before the sink has them, so a restarted daemon reads them again.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._dead_letters: list[DeadLetter] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._dead_letters)

    def __iter__(self) -> Iterator[DeadLetter]:
        return iter(self._dead_letters)

    def has_room_for(self, dead_letter: DeadLetter) -> bool:
        """Return whether `add` accepts it; an empty backlog accepts one of any size."""
        return not self._dead_letters or self.bytes + _size(dead_letter) <= self._max_bytes

    def add(self, dead_letter: DeadLetter) -> None:
        """Append one dead letter.

        Raises:
            DeadLetterError: the backlog is full.
        """
        if not self.has_room_for(dead_letter):
            raise DeadLetterError(
                f"the dead-letter sink must accept dead letters, found {len(self)} waiting ({self.bytes >> 20} MiB): "
                "fix the error in the log, then restart; the restart reads their records again"
            )
        self._dead_letters.append(dead_letter)
        self.bytes += _size(dead_letter)

    def clear(self) -> None:
        self._dead_letters.clear()
        self.bytes = 0

    def drop(self, written: Collection[RecordId]) -> None:
        """Remove those of these records, which are written already."""
        self._dead_letters = [dead_letter for dead_letter in self._dead_letters if dead_letter.record.id not in written]
        self.bytes = sum(map(_size, self._dead_letters))


def _size(dead_letter: DeadLetter) -> int:
    record = dead_letter.record
    return _OVERHEAD_BYTES + len(dead_letter.message) + len(record.value or b"") + len(record.key or b"")


PREFIX = "__streamlearn.errors."
LEFT_OUT_BYTES = PREFIX + "left.out.bytes"
"""Size of the value of a record whose value, key and headers were left out because the sink refused them."""
_PLACE = (PREFIX + "topic", PREFIX + "partition", PREFIX + "offset")


def headers_of(dead_letter: DeadLetter) -> dict[str, str]:
    """Return the headers in Kafka Connect's order. Text that is not valid Unicode is escaped."""
    record = dead_letter.record
    fields = {
        "topic": record.origin.topic,
        "partition": str(record.origin.partition),
        "offset": str(record.offset),
        "stage": stage_of(dead_letter.reason),
        "exception.class.name": str(dead_letter.reason),
        "exception.message": dead_letter.message.encode("utf-8", "backslashreplace").decode(),
        "timestamp": str(record.timestamp_ms),
    }
    return {PREFIX + name: value for name, value in fields.items()}


def own_headers(record: Record) -> list[tuple[str, bytes | None]]:
    """Return the record's own headers, without any that has the prefix."""
    return [(name, value) for name, value in record.headers if not name.startswith(PREFIX)]


def record_of(headers: Mapping[str, str] | Iterable[tuple[str, bytes | None]]) -> RecordId | None:
    """Return the record of a dead letter, or None when the headers are not those of a dead letter."""
    fields = headers if isinstance(headers, Mapping) else text_of(pair for pair in headers if pair[0] in _PLACE)
    try:
        topic, partition, offset = (fields[name] for name in _PLACE)
        return RecordId(TopicPartition(topic, int(partition)), int(offset))
    except (KeyError, ValueError):
        return None


def text_of(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """Return the headers as text, without those that Kafka stores without a value."""
    return {name: value.decode("utf-8", "replace") for name, value in headers if value is not None}


def stage_of(reason: str) -> str:
    """Kafka Connect's stage: the converter could not read the record, or the task could not use it."""
    return "TASK_PUT" if reason in (Reason.NOT_FINITE_UPDATE, Reason.SKIPPED) else "VALUE_CONVERTER"


def from_headers(
    headers: Mapping[str, str],
    *,
    value: bytes | None,
    key: bytes | None,
    own: tuple[tuple[str, bytes | None], ...],
    written_ms: int | None = None,
) -> DeadLetter | None:
    """Return the dead letter that these headers describe; None if they describe none."""
    record_id = record_of(headers)
    if record_id is None:
        return None
    timestamp, left_out = headers.get(f"{PREFIX}timestamp", "0"), headers.get(LEFT_OUT_BYTES, "")
    timestamp_ms = int(timestamp) if timestamp.lstrip("-").isdecimal() else 0
    return DeadLetter(
        Record(record_id.origin, record_id.offset, value, key, own, timestamp_ms),
        reason=headers.get(f"{PREFIX}exception.class.name", ""),
        message=headers.get(f"{PREFIX}exception.message", ""),
        written_ms=written_ms,
        left_out_bytes=int(left_out) if left_out.isdecimal() else None,
    )


_TAIL_BYTES = 1 << 16
_FLUSH_BYTES = 1 << 20
"""Size of the backlog that triggers a `flush`; after each failure, as with a full disk, twice its size does."""


class FileDeadLetters:
    """An append-only file, readable by its owner only. Opening it removes the incomplete last line of a crash."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            DeadLetterError: it is not writable.
        """
        self._path = path
        self._backlog = DeadLetterBacklog()
        self._flush_at = _FLUSH_BYTES
        self._failed_sync: OSError | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "a+b", buffering=0)
            _drop_incomplete_line(self._file)
            self._durable_bytes = self._sync()
            _sync_folder(path.parent)
        except OSError as error:
            raise self._error("opened", error) from error

    def recall(self, mark: Mapping[str, Any] | None) -> frozenset[RecordId]:
        """Records of the dead letters after `mark`; all of them when the mark belongs to another or a replaced file.

        Raises:
            DeadLetterError: the file cannot be read, or a line is not a dead letter.
        """
        records = set()
        try:
            with self._path.open("rb") as file:
                start = self._start(file, mark)
                file.seek(start)
                for line in file:
                    records.add(self._record(line, start))
                    start += len(line)
        except OSError as error:
            raise self._error("read", error) from error
        return frozenset(records)

    def send(self, dead_letter: DeadLetter) -> None:
        """Add one dead letter to the backlog; a large backlog is flushed.

        Raises:
            DeadLetterError: the backlog is full because the disk is.
        """
        if not self._backlog.has_room_for(dead_letter):
            with suppress(DeadLetterError):  # `add` raises one that says what to do
                self.flush()
        self._backlog.add(dead_letter)
        if self._backlog.bytes >= self._flush_at:
            self._flush_at = 2 * self._backlog.bytes
            with suppress(DeadLetterError):  # the next `flush` raises it
                self.flush()

    def flush(self) -> None:
        """Block until every dead letter is on the disk.

        Raises:
            DeadLetterError: one is not. After a failed write (a full disk) the next call tries all again; after a
                failed fsync every call fails, because a second fsync could report success although data is lost.
        """
        if self._failed_sync is not None:
            raise self._error("flushed", self._failed_sync) from self._failed_sync
        lines = b"".join(map(_line, self._backlog))
        try:
            if lines and (written := os.write(self._file.fileno(), lines)) != len(lines):
                raise OSError(errno.ENOSPC, f"No space left for {len(lines)} bytes, only for {written}")
        except OSError as error:
            with suppress(OSError):  # an incomplete line is removed at the next start otherwise
                os.ftruncate(self._file.fileno(), self._durable_bytes)
            raise self._error("flushed", error) from error
        try:
            self._durable_bytes = self._sync()
        except OSError as error:
            self._failed_sync = error
            raise self._error("flushed", error) from error
        self._backlog.clear()
        self._flush_at = _FLUSH_BYTES

    def mark(self) -> Mapping[str, Any]:
        """The file's name and its length at the last `flush`."""
        return {"file": self._path.name, "bytes": self._durable_bytes}

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        try:
            self._file.close()
        except OSError as error:
            raise self._error("closed", error) from error

    def _sync(self) -> int:
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def _start(self, file: IO[bytes], mark: Mapping[str, Any] | None) -> int:
        """The byte to read from: the mark, if a line ends right before it."""
        if mark is None or mark.get("file") != self._path.name or not mark["bytes"]:
            return 0
        file.seek(mark["bytes"] - 1)
        return int(mark["bytes"]) if file.read(1) == b"\n" else 0

    def _record(self, line: bytes, start: int) -> RecordId:
        try:
            record = record_of(orjson.loads(line)["headers"])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            record = None
        if record is None:
            raise DeadLetterError(
                f"{self._path}: expected a dead letter at byte {start}, found {line[:60]!r}. Move the file away, "
                "then restart"
            )
        return record

    def _error(self, what: str, error: OSError) -> DeadLetterError:
        return DeadLetterError(f"dead letters cannot be {what}: {self._path}: {error.strerror or error}")


def _line(dead_letter: DeadLetter) -> bytes:
    record = dead_letter.record
    line = {
        "headers": headers_of(dead_letter),
        "record_headers": [[name, _base64(value)] for name, value in own_headers(record)],
        "key": _base64(record.key),
        "value": _base64(record.value),
    }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _drop_incomplete_line(file: FileIO) -> None:
    """Truncate the file after its last newline."""
    end = file.seek(0, os.SEEK_END)
    complete = end
    while complete:
        start = max(0, complete - _TAIL_BYTES)
        file.seek(start)
        newline = (file.read(complete - start) or b"").rfind(b"\n")
        if newline >= 0:
            complete = start + newline + 1
            break
        complete = start
    if complete < end:
        file.truncate(complete)


def _sync_folder(folder: Path) -> None:
    """Make the file's name durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def read_file(path: Path) -> Iterator[DeadLetter]:
    """Yield every dead letter, oldest first; none if there is no file. An incomplete last line is left out.

    Raises:
        DeadLetterError: the file cannot be read, or a line is not a dead letter.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _dead_letter(path, number, line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DeadLetterError(f"dead letters cannot be read: {path}: {error.strerror or error}") from error


def _dead_letter(path: Path, number: int, line: bytes) -> DeadLetter:
    try:
        entry = orjson.loads(line)
        own = tuple((str(name), _bytes(value)) for name, value in entry["record_headers"])
        dead_letter = from_headers(entry["headers"], value=_bytes(entry["value"]), key=_bytes(entry["key"]), own=own)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError, binascii.Error):
        dead_letter = None
    if dead_letter is None:
        raise DeadLetterError(
            f"{path}: expected a dead letter in line {number}, found another line. Move the file away"
        )
    return dead_letter


def _bytes(text: Any) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)
