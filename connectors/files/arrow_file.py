"""Arrow IPC as a file of rows: streams, as Hugging Face datasets write them, and files (Feather)."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connectors.files.arrow_rows import pyarrow, rows_of
from connectors.files.row_file import FileRow
from streamlearn.errors import SourceError

_FILE_MAGIC = b"ARROW1"


class ArrowFile:
    """An Arrow file, mapped into memory: only what is read occupies it."""

    def __init__(self, path: Path) -> None:
        """Read the schema.

        Raises:
            UsageError: pyarrow is not installed.
            SourceError: it is no Arrow file.
        """
        self.path = path
        self._arrow = pyarrow()
        self._ipc = self._arrow.ipc
        self.fraction = 0.0
        with self._opened() as (_, reader):
            self._schema = reader.schema

    @property
    def columns(self) -> tuple[str, ...]:
        """The names in the schema."""
        return tuple(self._schema.names)

    def rows(self, columns: Collection[str]) -> Iterator[FileRow]:
        """Yield the rows; see `RowFile`."""
        self.fraction = 0.0
        with self._opened() as (mapped, reader):
            yield from rows_of(self.path, self._batches(mapped, reader, sorted(columns)), self._schema)
        self.fraction = 1.0

    def _batches(self, mapped: Any, reader: Any, columns: list[str]) -> Iterator[Any]:
        if hasattr(reader, "num_record_batches"):
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = iter(reader)
        for batch in batches:
            yield batch.select(columns)
            self.fraction = mapped.tell() / mapped.size()

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        try:
            with self._arrow.memory_map(str(self.path)) as mapped:
                is_file = mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC
                mapped.seek(0)
                yield mapped, (self._ipc.open_file(mapped) if is_file else self._ipc.open_stream(mapped))
        except (self._arrow.ArrowException, OSError) as error:
            raise SourceError(f"{self.path} must be a readable Arrow file, found {error}") from error
