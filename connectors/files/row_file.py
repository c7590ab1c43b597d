"""A file of rows, whatever its format: what every reader of this package implements."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from streamlearn.errors import SourceError


class Place(NamedTuple):
    """Where a row stands, for messages."""

    path: Path
    unit: str
    """line or row."""
    number: int
    """From 1, as editors and tables count."""

    def __str__(self) -> str:
        return f"{self.path} {self.unit} {self.number}"


class FileRow(NamedTuple):
    """The values of one row by column."""

    place: Place
    values: Mapping[str, Any]


class RowError(SourceError):
    """One row cannot become a record; the rows before and after it can."""


class RowFile(Protocol):
    """A file that can be read again and again from its first row, in bounded memory."""

    path: Path

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Its columns; None where each row has its own, as in JSONL."""

    def rows(self, columns: Collection[str]) -> Iterator[FileRow | RowError]:
        """Yield the rows in order, with at least these columns; a damaged row as the error that describes it.

        Raises:
            SourceError: the file is damaged or gone.
        """

    @property
    def fraction(self) -> float:
        """Share of the file that the newest `rows` has read, 0 to 1."""
