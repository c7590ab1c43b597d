"""CSV as a file of rows: the first line names the columns. Read with the standard library."""

import csv
import gzip
import io
import os
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from connectors.files.row_file import FileRow, Place, RowError
from connectors.lines import MAX_LINE_BYTES, READ_ERRORS
from streamlearn.errors import SourceError, UsageError

_ERRORS = (*READ_ERRORS, UnicodeDecodeError, csv.Error)


class CsvFile:
    """A CSV file in UTF-8, with or without a byte order mark, gzip if its name ends in .gz."""

    def __init__(self, path: Path, delimiter: str) -> None:
        """Read the header.

        Raises:
            UsageError: there is no header, or it names a column twice.
            SourceError: the file cannot be read.
        """
        csv.field_size_limit(MAX_LINE_BYTES)
        self.path = path
        self._delimiter = delimiter
        self._raw: BinaryIO | None = None
        self._size = 0
        reader = self._cells()
        _, self._header = next(reader, (0, []))
        reader.close()
        if not any(self._header):
            raise UsageError(f"{path}: expected a first line with the names of the columns, found none")
        twice = sorted({name for name in self._header if self._header.count(name) > 1})
        if twice:
            raise UsageError(f"{path}: expected each column once, found {twice[0]!r} twice. Rename one of them")

    @property
    def columns(self) -> tuple[str, ...]:
        """The names in the header."""
        return tuple(self._header)

    def rows(self, columns: Collection[str]) -> Iterator[FileRow | RowError]:
        """Yield each row's cells as strings; see `RowFile`."""
        del columns  # a line is parsed as a whole
        cells = self._cells()
        next(cells)
        for line, values in cells:
            place = Place(self.path, "line", line)
            if len(values) != len(self._header):
                yield RowError(
                    f"{place} must have {len(self._header)} cells as the header has, found {len(values)}. Quote cells "
                    f"that hold {self._delimiter!r} or line breaks"
                )
            else:
                yield FileRow(place, dict(zip(self._header, values, strict=True)))

    @property
    def fraction(self) -> float:
        """Share of the file that was read."""
        if self._raw is None or self._raw.closed:
            return float(self._raw is not None)
        return self._raw.tell() / self._size if self._size else 1.0

    def _cells(self) -> Generator[tuple[int, Sequence[str]]]:
        """Yield each row that is not blank, with the number of its last line."""
        reader = None
        try:
            with self.path.open("rb") as raw:
                self._raw, self._size = raw, os.fstat(raw.fileno()).st_size
                plain = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if self.path.suffix == ".gz" else raw
                text = io.TextIOWrapper(plain, encoding="utf-8-sig", newline="")
                reader = csv.reader(text, delimiter=self._delimiter, strict=True)
                for cells in reader:
                    if cells:
                        yield reader.line_num, cells
        except _ERRORS as error:
            line = 0 if reader is None else reader.line_num
            raise SourceError(f"{self.path} must be readable CSV in UTF-8, found after line {line}: {error}") from error
