"""Dead letters in a JSONL file: one per line, bytes in base64, so that any tool can read and replay them."""

import base64
import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

import orjson

from connectors.dead_letter_backlog import DeadLetterBacklog
from connectors.dead_letter_headers import headers_of, own_headers, record_of
from streamlearn.errors import DeadLetterError
from streamlearn.stream.record import RecordId
from streamlearn.stream.source import DeadLetter

_TAIL_BYTES = 1 << 16
_FLUSH_BYTES = 1 << 20
"""Size of the backlog that triggers a `flush`; the backlog grows beyond it while the disk is full."""


class FileDeadLetters:
    """An append-only file, readable by its owner only. Opening it removes the incomplete last line of a crash."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            DeadLetterError: it is not writable.
        """
        self._path = path
        self._backlog = DeadLetterBacklog()
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
        self._backlog.add(dead_letter)
        if self._backlog.bytes >= _FLUSH_BYTES:
            with suppress(DeadLetterError):  # the next `flush` raises it
                self.flush()

    def flush(self) -> None:
        """Block until every dead letter is on the disk.

        Raises:
            DeadLetterError: one is not. After a failed write (a full disk) the next call tries all again; after a
                failed fsync every call fails, because a second fsync could report a success that is none.
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
