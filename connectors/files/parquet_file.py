"""Parquet as a file of rows."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from connectors.files.arrow_rows import SLICE_ROWS, pyarrow, rows_of
from connectors.files.row_file import FileRow
from streamlearn.errors import SourceError


class ParquetFile:
    """A Parquet file; only the columns that are asked for are decoded, a few hundred rows at a time."""

    def __init__(self, path: Path) -> None:
        """Read the schema.

        Raises:
            UsageError: pyarrow is not installed.
            SourceError: it is no Parquet file.
        """
        self.path = path
        self._arrow = pyarrow()
        self._parquet = self._arrow.parquet
        self._read = 0
        with self._open() as file:
            self._schema = file.schema_arrow
            self._num_rows: int = file.metadata.num_rows

    @property
    def columns(self) -> tuple[str, ...]:
        """The names in the schema."""
        return tuple(self._schema.names)

    def rows(self, columns: Collection[str]) -> Iterator[FileRow]:
        """Yield the rows; see `RowFile`."""
        self._read = 0
        with self._open() as file:
            batches = file.iter_batches(batch_size=SLICE_ROWS, columns=sorted(columns))
            try:
                for row in rows_of(self.path, batches, self._schema):
                    self._read += 1
                    yield row
            except (self._arrow.ArrowException, OSError) as error:
                raise self._damaged(error) from error

    @property
    def fraction(self) -> float:
        """Share of the rows that were read."""
        return self._read / self._num_rows if self._num_rows else 1.0

    def _open(self) -> Any:
        try:
            return self._parquet.ParquetFile(self.path)
        except (self._arrow.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> SourceError:
        return SourceError(f"{self.path} must be a readable Parquet file, found after row {self._read}: {error}")
