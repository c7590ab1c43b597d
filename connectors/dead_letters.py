"""Dead letters in a JSONL file: one line a letter, bytes as base64, so that any tool can read and replay them."""

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
from connectors.dead_letter_headers import Origin, headers_of, origin_of, own_headers
from streamlearn.errors import DeadLetterError
from streamlearn.stream.source import DeadLetter

_TAIL_BYTES = 1 << 16
_WRITE_BYTES = 1 << 20
"""So much may wait for the next `flush`; a disk that takes none may leave more waiting."""


class FileDeadLetters:
    """An append-only file. Opening it drops the torn last line that a crash may have left."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            DeadLetterError: it cannot be written.
        """
        self._path = path
        self._waiting = DeadLetterBacklog()
        self._lost_sync: OSError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            _drop_torn_line(self._file)
            self._durable_bytes = self._sync()
            _sync_folder(path.parent)
        except OSError as error:
            raise self._failed("opened", error) from error

    def recall(self, mark: Mapping[str, Any] | None) -> frozenset[Origin]:
        """Origins and offsets of the letters behind `mark`; all of them when the mark is of another or a replaced file.

        Raises:
            DeadLetterError: the file cannot be read, or holds a line that is not a letter.
        """
        origins = set()
        try:
            with self._path.open("rb") as file:
                start = self._start(file, mark)
                file.seek(start)
                for line in file:
                    origins.add(self._origin(line, start))
                    start += len(line)
        except OSError as error:
            raise self._failed("read", error) from error
        return frozenset(origins)

    def send(self, letter: DeadLetter) -> None:
        """Let one letter wait for the next `flush`, which many of them bring about.

        Raises:
            DeadLetterError: too many wait because the disk takes none.
        """
        self._waiting.add(letter)
        if self._waiting.bytes >= _WRITE_BYTES:
            with suppress(DeadLetterError):  # the next `flush` tells
                self.flush()

    def flush(self) -> None:
        """Block until every letter is on the disk.

        Raises:
            DeadLetterError: it is not; after a full disk all are tried again at the next time, after a failed fsync
                nothing is, for a second one may lie.
        """
        if self._lost_sync is not None:
            raise self._failed("flushed", self._lost_sync) from self._lost_sync
        lines = b"".join(map(_line, self._waiting))
        try:
            if lines and (written := os.write(self._file.fileno(), lines)) != len(lines):
                raise OSError(errno.ENOSPC, f"No space left for {len(lines)} bytes, only for {written}")
        except OSError as error:
            with suppress(OSError):  # a torn line is cut at the next start otherwise
                os.ftruncate(self._file.fileno(), self._durable_bytes)
            raise self._failed("flushed", error) from error
        try:
            self._durable_bytes = self._sync()
        except OSError as error:
            self._lost_sync = error
            raise self._failed("flushed", error) from error
        self._waiting.clear()

    def mark(self) -> Mapping[str, Any]:
        """The file's name and its length at the last `flush`."""
        return {"file": self._path.name, "bytes": self._durable_bytes}

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        try:
            self._file.close()
        except OSError as error:
            raise self._failed("closed", error) from error

    def _sync(self) -> int:
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def _start(self, file: IO[bytes], mark: Mapping[str, Any] | None) -> int:
        """Where to read from: the mark, if a line ends just before it."""
        if mark is None or mark.get("file") != self._path.name or not mark["bytes"]:
            return 0
        file.seek(mark["bytes"] - 1)
        return int(mark["bytes"]) if file.read(1) == b"\n" else 0

    def _origin(self, line: bytes, start: int) -> Origin:
        try:
            origin = origin_of(orjson.loads(line)["headers"])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            origin = None
        if origin is None:
            raise DeadLetterError(
                f"{self._path}: at byte {start} a dead letter must stand, found {line[:60]!r}. Move the file away, "
                "then restart"
            )
        return origin

    def _failed(self, what: str, error: OSError) -> DeadLetterError:
        return DeadLetterError(f"dead letters cannot be {what}: {self._path}: {error.strerror or error}")


def _line(letter: DeadLetter) -> bytes:
    record = letter.record
    line = {
        "headers": headers_of(letter),
        "record_headers": [[name, _base64(value)] for name, value in own_headers(record)],
        "key": _base64(record.key),
        "value": _base64(record.value),
    }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _drop_torn_line(file: FileIO) -> None:
    """Cut the file behind its last newline."""
    end = file.seek(0, os.SEEK_END)
    whole = end
    while whole:
        start = max(0, whole - _TAIL_BYTES)
        file.seek(start)
        newline = (file.read(whole - start) or b"").rfind(b"\n")
        if newline >= 0:
            whole = start + newline + 1
            break
        whole = start
    if whole < end:
        file.truncate(whole)


def _sync_folder(folder: Path) -> None:
    """Make the file's name durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()
