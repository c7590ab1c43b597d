"""JSONL as a file of rows: one JSON object per line."""

from collections.abc import Collection, Iterator
from pathlib import Path

import orjson

from connectors.files.row_file import FileRow, Place, RowError
from connectors.lines import LineReader


class JsonlFile:
    """A JSONL file, gzip if its name ends in .gz. Blank lines are left out and counted."""

    columns = None

    def __init__(self, path: Path) -> None:
        """Check that the file can be opened.

        Raises:
            SourceError: it cannot.
        """
        self.path = path
        self._reader = LineReader(path)
        self._reader.close()

    def lines(self) -> Iterator[tuple[Place, bytes]]:
        """Yield each line as it stands, without its newline.

        Raises:
            SourceError: the file is damaged after the last line.
        """
        self._reader = reader = LineReader(self.path)
        try:
            while (line := reader.next_line()) is not None:
                if line.strip():
                    yield Place(self.path, "line", reader.number), line
        finally:
            reader.close()

    def rows(self, columns: Collection[str]) -> Iterator[FileRow | RowError]:
        """Yield each line's object; see `RowFile`."""
        del columns  # a line is parsed as a whole
        for place, line in self.lines():
            yield _row(place, line)

    @property
    def fraction(self) -> float:
        """Share of the file that was read."""
        return self._reader.fraction


def _row(place: Place, line: bytes) -> FileRow | RowError:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return RowError(f"{place} must be a JSON object, found: {error}. Correct the line")
    if not isinstance(values, dict):
        return RowError(f"{place} must be a JSON object, found {type(values).__name__}. Correct the line")
    return FileRow(place, values)
