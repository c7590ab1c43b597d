"""A JSONL file as a source: read once, or followed while another program appends to it.

The file's name is the topic, the partition is 0, and a record's offset is its line number from 0. Its first line is the
topic's identity. A file whose name ends in .gz is read as gzip. Memory is bounded however long a line is.
"""

import gzip
import hashlib
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, cast

from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.events import Event, get_logger
from streamlearn.settings import JsonlSettings
from streamlearn.stream.position import Gap, OffsetRange, Position, TopicPartition
from streamlearn.stream.record import Record

MAX_LINE_BYTES = 64 << 20
"""Of a longer line one byte more than this is returned, so that a decoder with any reasonable limit refuses it."""

_CHUNK_BYTES = 1 << 20

READ_ERRORS = (OSError, EOFError, zlib.error)
"""What reading raises: disk errors, a truncated or invalid gzip file, a damaged deflate block."""


_MARK = b"\xef\xbb\xbf"
"""UTF-8's byte order mark."""
_OTHER_CONTENT = (
    ("UTF-32", re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff|[{ ]\0\0\0|\0\0\0[{ ]")),
    ("UTF-16", re.compile(rb"\xff\xfe.\0|\xfe\xff\0.|[{ ]\0[^\0]\0|\0[{ ]\0[^\0]", re.DOTALL)),
    ("gzip, but a name without .gz", re.compile(rb"\x1f\x8b\x08")),
)
"""What else a file is, by its first bytes."""


class LineReader:
    """Reads a file line by line, without UTF-8's byte order mark; the file may still be growing."""

    def __init__(
        self,
        path: Path,
        *,
        growing: bool = False,
        max_line_bytes: int = MAX_LINE_BYTES,
        stream: BinaryIO | None = None,
    ) -> None:
        """Open the file, or read `stream`, which `path` only names.

        Raises:
            SourceError: it cannot be opened.
        """
        self.number = 0
        """Number of the next line."""
        self._path = path
        self._growing = growing
        self._max_line_bytes = max_line_bytes
        self._head = b""
        self._skipping = False
        try:
            self._stream = _open(path) if stream is None else stream
        except OSError as error:
            raise SourceError(f"{path} must be a readable file, found: {error.strerror}") from error

    def next_line(self) -> bytes | None:
        """Return the next line without its newline; None at the end of the file, or of a growing file so far.

        Raises:
            SourceError: the file is damaged at this line, or is not UTF-8 from its first bytes on.
        """
        try:
            line = self._next_line()
        except READ_ERRORS as error:
            raise self._damaged(error) from error
        if self.number == 1 and line is not None:
            self._check_encoding(line)
            return line.removeprefix(_MARK)
        return line

    def skip_to(self, number: int) -> None:
        """Skip the first `number` lines.

        Raises:
            OffsetGapError: the file has fewer lines.
            SourceError: the file is damaged before that line.
        """
        try:
            while self.number < number and self._drop_line():
                self.number += 1
        except READ_ERRORS as error:
            raise self._damaged(error) from error
        if self.number < number:
            raise OffsetGapError(
                f"{self._path} must have the {number} lines that were trained, found {self.number}: it was truncated "
                "or replaced. Restore the original, or start over with --fresh"
            )

    @property
    def fraction(self) -> float:
        """Share of the file that was read, 0 to 1; of the compressed bytes if it is gzip."""
        if self._stream.closed:
            return 1.0
        raw = self._stream.fileobj if isinstance(self._stream, gzip.GzipFile) else self._stream
        size = os.fstat(self._stream.fileno()).st_size
        return float(raw.tell() / size) if size and raw is not None else 1.0

    def check_identity(self) -> None:
        """Check that the path still names the open file, and that the file was not truncated.

        Raises:
            OffsetGapError: the file was truncated or replaced.
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
            f"{self._path} {fault} ({self.number} lines). A followed file may only grow: restore the original, or "
            "start over with --fresh"
        )

    def close(self) -> None:
        self._stream.close()

    def _check_encoding(self, line: bytes) -> None:
        other = next((name for name, beginning in _OTHER_CONTENT if beginning.match(line)), None)
        if other is not None:
            advice = "rename it" if "gz" in other else f"convert it, for example with `iconv -f {other} -t UTF-8`"
            raise SourceError(f"{self._path} must be lines of JSON in UTF-8, found {other}: {advice}")

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
        """Read up to the next newline; return whether there was anything to read.

        If the line is incomplete so far, the rest of it is dropped by the next call.
        """
        read_any = False
        while chunk := self._stream.readline(_CHUNK_BYTES):
            read_any = True
            if chunk.endswith(b"\n"):
                self._skipping = False
                return True
        self._skipping = self._growing and (read_any or self._skipping)
        return read_any

    def _damaged(self, error: Exception) -> SourceError:
        return SourceError(
            f"{self._path} must be readable, found after line {self.number}: {error}. Repair or replace the file, then "
            "restart"
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
        """Return the number of lines so far; read a growing file up to `max_bytes` further, a finite one to its end."""
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
    """Yield every line of a file that is not blank, without its newline.

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
    """Whether `path` names a file other than the open one; False while the path does not exist."""
    try:
        return not os.path.samestat(path.stat(), handle)
    except OSError:
        return False


_POLL_BYTES = 8 << 20
"""A poll returns early once it holds this many bytes, even below max_records."""

_COUNT_BYTES = 64 << 20
"""Maximum number of bytes that one `lag` call counts ahead in a followed file: 0.05 s."""


class JsonlSource:
    """One partition; the offset of a record is its line number, from 0. Blank lines are skipped but numbered.

    A last line without a newline is a record in a file that is read once; in a followed file it waits for its newline.
    """

    def __init__(
        self,
        settings: JsonlSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._path = settings.path
        self._follow = settings.follow
        self._poll_interval_s = settings.poll_interval_s
        self._clock = clock
        self._sleep = sleep
        self._max_line_bytes = max_line_bytes
        self._origin = TopicPartition(settings.path.name, 0)
        self._reader: LineReader | None = None
        self._counter = LineCounter(settings.path, growing=settings.follow)
        self._first: str | None = None
        """Hash of the first line; None before there is one."""
        self._next: Record | None = None
        self._failure: SourceError | None = None
        self._log = get_logger("connectors")

    def seek(
        self,
        position: Position,
        identity: Mapping[str, str] | None = None,
        skipped: Sequence[OffsetRange] = (),
    ) -> Position:
        """Open the file and skip the lines before `position`; none if it does not name this file.

        Raises:
            OffsetGapError: the file has fewer lines, or begins with another line than at `position`.
            SourceError: the file cannot be read.
        """
        del skipped  # each line can be read
        self.close()
        self._first = None
        if line := position.get(self._origin, 0):
            with closing(self._open_at(0)) as first:
                self._note_first(first.next_line())
        self._reader = self._open_at(line)
        self._failure = None
        here = Position({self._origin: self._reader.number})
        self._log.info(Event.SOURCE_OPENED, path=str(self._path), follow=self._follow, line=self._reader.number)
        self._read_ahead()
        if (before := (identity or {}).get(self._origin.topic, self._first)) and self._first not in (None, before):
            raise OffsetGapError(
                f"{self._path} must begin with the same line as when it was read: it was replaced, or deleted and "
                "created again. Restore the original, give the new file another name, or start over with --fresh"
            )
        return here

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """Return the next lines; at the end of a followed file wait up to `timeout_s` for more.

        Raises:
            OffsetGapError: a followed file was truncated or replaced.
            SourceError: the file is damaged after the last line returned.
        """
        deadline = self._clock() + timeout_s
        while not (records := self._take(max_records)):
            remaining = deadline - self._clock()
            if not self._follow or remaining <= 0:
                break
            self._sleep(min(self._poll_interval_s, remaining))
        return records

    def commit(self, position: Position, note: str) -> None:
        """Do nothing: a file has no consumer groups."""

    def lag(self, position: Position) -> Mapping[TopicPartition, int]:
        """Known lines after `position`, including blank ones. The first call reads the whole file if not followed."""
        try:
            known = self._counter.count(_COUNT_BYTES)
        except READ_ERRORS:
            return {}  # poll raises the error when it gets there
        return {self._origin: max(0, known - position.get(self._origin, 0))}

    @property
    def identity(self) -> Mapping[str, str]:
        """The hash of the first line, which another file of the same name hardly has; empty before there is one."""
        return {} if self._first is None else {self._origin.topic: self._first}

    @property
    def gaps(self) -> Sequence[Gap]:
        """Always empty: lines do not expire."""
        return ()

    @property
    def reached(self) -> Mapping[TopicPartition, int]:
        """The number of the next line."""
        if self._reader is None:
            return {}
        return {self._origin: self._reader.number if self._next is None else self._next.offset}

    @property
    def exhausted(self) -> bool:
        """Whether every line of a file that is not followed has been returned."""
        return not self._follow and self._next is None and self._failure is None

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._next = None

    def _note_first(self, line: bytes | None) -> None:
        self._first = None if line is None else hashlib.sha256(line).hexdigest()[:16]

    def _open_at(self, line: int) -> LineReader:
        reader = LineReader(self._path, growing=self._follow, max_line_bytes=self._max_line_bytes)
        try:
            reader.skip_to(line)
        except SourceError:
            reader.close()
            raise
        return reader

    def _take(self, max_records: int) -> list[Record]:
        if self._next is None and self._follow:
            self._read_ahead()
        records: list[Record] = []
        size = 0
        while self._next is not None and len(records) < max_records and size < _POLL_BYTES:
            records.append(self._next)
            size += len(self._next.value or b"")
            self._read_ahead()
        if self._failure is not None and not records:
            raise self._failure
        return records

    def _read_ahead(self) -> None:
        """Read the next record. An error is raised only after all records before it were returned."""
        self._next = None
        assert self._reader is not None, "seek must be called first"
        try:
            while (line := self._reader.next_line()) is not None:
                if self._reader.number == 1:
                    self._note_first(line)
                if line.strip():
                    self._next = Record(self._origin, self._reader.number - 1, line)
                    return
            if self._follow:
                self._reader.check_identity()
        except SourceError as error:
            self._failure = error
