"""A JSONL file as a source: read once, or followed while another program appends to it."""

import time
from collections.abc import Callable, Mapping, Sequence

from connectors.lines import MAX_LINE_BYTES, READ_ERRORS, LineCounter, LineReader
from streamlearn.errors import SourceError
from streamlearn.events import Event, get_logger
from streamlearn.settings import JsonlSettings
from streamlearn.stream.record import Gap, Position, Record, TopicPartition

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
        self._next: Record | None = None
        self._failure: SourceError | None = None
        self._log = get_logger("connectors")

    def seek(self, position: Position, identity: Mapping[str, str] | None = None) -> Position:
        """Open the file and skip the lines before `position`; none if it does not name this file.

        Raises:
            OffsetGapError: the file has fewer lines.
            SourceError: the file cannot be read.
        """
        del identity  # a file has none
        self.close()
        self._reader = self._open_at(position.get(self._origin, 0))
        self._failure = None
        here = Position({self._origin: self._reader.number})
        self._log.info(Event.SOURCE_OPENED, path=str(self._path), follow=self._follow, line=self._reader.number)
        self._read_ahead()
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
        """Always empty: a file has no id besides its name."""
        return {}

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
        """Close the file. Safe to call twice."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._next = None

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
                if line.strip():
                    self._next = Record(self._origin, self._reader.number - 1, line)
                    return
            if self._follow:
                self._reader.check_identity()
        except SourceError as error:
            self._failure = error
