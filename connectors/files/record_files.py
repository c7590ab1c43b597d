"""The records of one or several files, in order."""

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from connectors.files.column_mapping import ColumnMapping
from connectors.files.jsonl_file import JsonlFile
from connectors.files.row_file import FileRow, Place, RowError, RowFile
from streamlearn.errors import SourceError


class FeedRecord(NamedTuple):
    """One record to send."""

    value: bytes
    place: Place
    """Where it was read."""


class RecordFiles:
    """Records from rows, or, without a mapping, the lines of JSONL files as they stand."""

    def __init__(self, files: Sequence[RowFile], mapping: ColumnMapping | None, *, skip_bad_rows: bool = False) -> None:
        """Check that every file has the columns.

        Args:
            files: In the order in which they are read.
            mapping: Which columns become which field; None only if every file is JSONL.
            skip_bad_rows: Whether to leave out rows that cannot become records.

        Raises:
            UsageError: a file lacks a column.
        """
        for file in files:
            if mapping is not None and file.columns is not None:
                mapping.check(file.columns, file.path)
        self.mapping = mapping
        self.num_skipped = 0
        """Rows that were left out."""
        self._files = files
        self._skip_bad_rows = skip_bad_rows
        self._done = 0

    def __iter__(self) -> Generator[FeedRecord]:
        """Read all files from the beginning.

        Raises:
            RowError: a row cannot become a record.
            SourceError: a file cannot be read.
        """
        self._done = 0
        for file in self._files:
            yield from self._records(file)
            self._done += 1

    def first(self) -> FeedRecord | None:
        """The first record; None if there is none. Raises what `__iter__` raises."""
        skipped = self.num_skipped
        reading = iter(self)
        try:
            return next(reading, None)
        finally:
            reading.close()
            self.num_skipped = skipped

    @property
    def fraction(self) -> float:
        """Share of the files that was read, 0 to 1; each file counts alike."""
        within = self._files[self._done].fraction if self._done < len(self._files) else 0.0
        return min(1.0, (self._done + within) / len(self._files))

    def _records(self, file: RowFile) -> Iterator[FeedRecord]:
        if self.mapping is None:
            assert isinstance(file, JsonlFile), "files in other formats need a mapping"
            yield from (FeedRecord(line, place) for place, line in file.lines())
            return
        for row in file.rows(self.mapping.columns):
            try:
                record = self._record(row, self.mapping)
            except RowError as error:
                if not self._skip_bad_rows:
                    raise SourceError(f"{error}, or leave such rows out with --skip-bad-rows") from error
                self.num_skipped += 1
            else:
                yield record

    def _record(self, row: FileRow | RowError, mapping: ColumnMapping) -> FeedRecord:
        if isinstance(row, RowError):
            raise row
        return FeedRecord(mapping.record(row), row.place)
