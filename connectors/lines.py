"""Numbered lines of a file, plain or gzip, in bounded memory.

The topic of such a file is its name, the partition 0 and a record's offset the number of its line, from 0.
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from streamlearn.errors import OffsetGapError, SourceError

MAX_LINE_BYTES = 64 << 20
"""Of a longer line one byte more than this is returned, so that a decoder with any sane limit refuses it."""

_CHUNK_BYTES = 1 << 20

DAMAGE = (OSError, EOFError, zlib.error)
"""What reading raises: the disk, a gzip cut short or not gzip at all, a damaged deflate block."""


class LineReader:
    """Walks through a file line by line; the file may still be growing."""

    def __init__(self, path: Path, *, growing: bool = False, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        """Open the file.

        Raises:
            SourceError: it cannot be opened.
        """
        self.number = 0
        """Of the next line."""
        self._path = path
        self._growing = growing
        self._max_line_bytes = max_line_bytes
        self._head = b""
        self._skipping = False
        try:
            self._stream = _open(path)
        except OSError as error:
            raise SourceError(f"{path} must be a readable file: {error.strerror}") from error

    def next_line(self) -> bytes | None:
        """Return the next line without its newline, or None when there is none yet (growing) or none at all.

        Raises:
            SourceError: the file is damaged here.
        """
        try:
            return self._next_line()
        except DAMAGE as error:
            raise self._damaged(error) from error

    def skip_to(self, number: int) -> None:
        """Go behind the first `number` lines.

        Raises:
            OffsetGapError: the file has fewer.
            SourceError: the file is damaged before that line.
        """
        try:
            while self.number < number and self._drop_line():
                self.number += 1
        except DAMAGE as error:
            raise self._damaged(error) from error
        if self.number < number:
            raise OffsetGapError(
                f"{self._path} must have the {number} lines that were trained, found {self.number}: it was truncated "
                "or replaced. Put the original back, or start with --fresh"
            )

    def check_identity(self) -> None:
        """Look whether the path still names the file that is being read, at full length.

        Raises:
            OffsetGapError: the file was truncated, or another one stands in its place.
        """
        handle = os.fstat(self._stream.fileno())
        read = self._stream.tell()
        if handle.st_size < read:
            fault = f"was truncated to {handle.st_size} bytes after {read} had been read"
        elif _is_another_file(self._path, handle):
            fault = "was replaced by another file"
        else:
            return
        raise OffsetGapError(
            f"{self._path} {fault} ({self.number} lines). A followed file may only grow: put the original back, or "
            "start with --fresh"
        )

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._stream.close()

    def _next_line(self) -> bytes | None:
        if self._skipping:
            self._drop_line()
            if self._skipping:
                return None
        line = self._head + self._stream.readline(self._max_line_bytes + 1 - len(self._head))
        self._head = b""
        ended = line.endswith(b"\n")
        if not ended and len(line) > self._max_line_bytes:
            self._skipping = True
        elif not ended and (self._growing or not line):
            self._head = line
            return None
        self.number += 1
        return line.removesuffix(b"\n")

    def _drop_line(self) -> bool:
        """Read up to the next newline; whether anything was there. What comes later of this line is dropped then."""
        found = False
        while chunk := self._stream.readline(_CHUNK_BYTES):
            found = True
            if chunk.endswith(b"\n"):
                self._skipping = False
                return True
        self._skipping = self._growing and (found or self._skipping)
        return found

    def _damaged(self, error: Exception) -> SourceError:
        return SourceError(
            f"{self._path} must be readable, and is not behind its first {self.number} lines: {error}. Repair or "
            "replace it, then restart"
        )


class LineCounter:
    """Counts the lines of a file: a finite one once, a growing one from where the last count ended."""

    def __init__(self, path: Path, *, growing: bool = False) -> None:
        self._path = path
        self._growing = growing
        self._bytes = 0
        self._lines = 0
        self._finished = False

    def count(self, max_bytes: int) -> int:
        """Return the lines known so far; a growing file is read up to `max_bytes` further, a finite one to its end."""
        if self._finished:
            return self._lines
        with _open(self._path) as stream:
            stream.seek(self._bytes)
            last = b"\n"
            while (max_bytes > 0 or not self._growing) and (chunk := stream.read(_CHUNK_BYTES)):
                self._bytes += len(chunk)
                self._lines += chunk.count(b"\n")
                max_bytes -= len(chunk)
                last = chunk[-1:]
        if not self._growing:
            self._lines += last != b"\n"
            self._finished = True
        return self._lines


def read_lines(path: Path) -> Iterator[bytes]:
    """Every line of a file that is not blank, without its newline.

    Raises:
        SourceError: the file cannot be opened or is damaged.
    """
    reader = LineReader(path)
    try:
        while (line := reader.next_line()) is not None:
            if line.strip():
                yield line
    finally:
        reader.close()


def _open(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))


def _is_another_file(path: Path, handle: os.stat_result) -> bool:
    """Whether `path` names a file other than the open one. A path that is gone for the moment does not."""
    try:
        return not os.path.samestat(path.stat(), handle)
    except OSError:
        return False
