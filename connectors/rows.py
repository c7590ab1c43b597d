"""Rows of files: lines of JSONL as they stand, or values by column.

JSONL is read here, also from a pipe. CSV, Parquet, Arrow and the folders of data sets are read as a stream by Hugging
Face `datasets`, an optional dependency.
"""

import io
import json
import os
import select
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import numpy as np
import orjson

from connectors.jsonl import LineReader
from streamlearn.errors import SourceError, StreamlearnError, UsageError

_BUILDERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
"""End of a file's name -> the reader of `datasets`; .gz may follow it for csv and tsv."""
_REFUSED = (".json", ".xlsx", ".zip", ".zst", ".bz2", ".xz")
STDIN = Path("-")
_POLL_S = 0.2
"""How long a pipe waits for bytes before it looks whether to stop."""


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


class FeedRecord(NamedTuple):
    """One record to send."""

    value: bytes
    place: Place
    """Where it was read."""


class RowError(SourceError):
    """One row cannot become a record; the rows before and after it can."""

    def __init__(self, message: str, reason: str = "bad_row") -> None:
        super().__init__(message)
        self.reason = reason
        """A `Reason` of dead letters, or bad_row if there is no record to refuse."""


class RowFile(Protocol):
    """A file or folder, read in bounded memory; again and again from its first row, unless it is a pipe."""

    path: Path

    @property
    def is_pipe(self) -> bool:
        """Whether it can be read only once."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Its columns; None where each row has its own, as in JSONL."""

    def rows(self, columns: Collection[str]) -> Iterator[FileRow | RowError]:
        """Yield the rows in order, with at least these columns; a damaged row as the error that describes it.

        Raises:
            SourceError: the file is damaged or gone.
        """

    @property
    def fraction(self) -> float | None:
        """Share of the file that the newest `rows` has read, 0 to 1; None if its size is not known."""


class JsonlFile:
    """Lines of JSON: a file, gzip if its name ends in .gz, or a pipe. Blank lines are left out and counted."""

    columns = None

    def __init__(self, path: Path, *, stopped: Callable[[], bool] = lambda: False) -> None:
        """Check that the file can be opened.

        Args:
            path: The file; `-` is the standard input.
            stopped: Whether to end the reading of a pipe that has no bytes yet.

        Raises:
            SourceError: it cannot.
        """
        self.path = path
        self.is_pipe = _is_pipe(path)
        self._pipe = self._open_pipe(stopped) if self.is_pipe else None
        self._reader = self._pipe or LineReader(path)
        if not self.is_pipe:
            self._reader.close()

    def lines(self) -> Iterator[FeedRecord]:
        """Yield each line as it stands, without its newline; of a pipe those that were not read yet.

        Raises:
            SourceError: the file is damaged after the last line.
        """
        self._reader = reader = self._pipe or LineReader(self.path)
        try:
            while (line := reader.next_line()) is not None:
                if line.strip():
                    yield FeedRecord(line, Place(self.path, "line", reader.number))
        finally:
            if not self.is_pipe:
                reader.close()

    def _open_pipe(self, stopped: Callable[[], bool]) -> LineReader:
        try:
            file = os.dup(sys.stdin.fileno()) if self.path == STDIN else os.open(self.path, os.O_RDONLY)
        except (OSError, ValueError) as error:  # a closed standard input
            raise SourceError(f"{self.path} must be readable, found: {error}") from error
        return LineReader(self.path, stream=cast("BinaryIO", io.BufferedReader(_Pipe(file, stopped))))

    def rows(self, columns: Collection[str]) -> Iterator[FileRow | RowError]:
        """Yield each line's object; see `RowFile`."""
        del columns  # a line is parsed as a whole
        for line, place in self.lines():
            try:
                values = _parsed(line)
            except (ValueError, RecursionError) as error:
                yield RowError(f"{place} must be a JSON object, found: {error}. Correct the line")
                continue
            if isinstance(values, dict):
                yield FileRow(place, values)
            else:
                yield RowError(f"{place} must be a JSON object, found {type(values).__name__}. Correct the line")

    @property
    def fraction(self) -> float | None:
        return None if self.is_pipe else self._reader.fraction


class _Pipe(io.RawIOBase):
    """A pipe that ends when it is asked to stop while it waits for bytes."""

    def __init__(self, file: int, stopped: Callable[[], bool]) -> None:
        self._file = file
        self._stopped = stopped

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not select.select([self._file], [], [], _POLL_S)[0]:
            if self._stopped():
                return 0
        return os.readv(self._file, [buffer])

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


def _is_pipe(path: Path) -> bool:
    """Whether a path is the standard input, a pipe, or anything else that has no beginning to return to."""
    return path == STDIN or (path.exists() and not path.is_file() and not path.is_dir())


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        if b"NaN" in line or b"Infinity" in line:  # as Python writes a missing value
            return json.loads(line.decode())
        raise


class DatasetFile:
    """CSV, Parquet, Arrow, or a folder: of data files, or as `save_to_disk` writes it."""

    fraction = None
    is_pipe = False

    def __init__(
        self, path: Path, *, split: str | None = None, subset: str | None = None, delimiter: str | None = None
    ) -> None:
        """Open the file and learn its columns.

        Raises:
            UsageError: `datasets` is not installed, or split or subset are not of the folder's.
            SourceError: it cannot be read.
        """
        self.path = path
        self._is_csv = _BUILDERS.get(_suffix(path)) == "csv"
        with self._reading():
            data = _load_folder(path, split, subset) if path.is_dir() else _load_file(path, delimiter)
            self.columns = tuple(data.column_names or next(iter(data), {}))
            features = data.features or {}
        self._labels = {name: feature.names for name, feature in features.items() if hasattr(feature, "int2str")}
        self._short = {name: feature for name, feature in features.items() if _has_short_floats(feature)}
        self._data = data.decode(False) if features else data  # images stay bytes

    def rows(self, columns: Collection[str]) -> Iterator[FileRow]:
        """Yield the rows.

        Class labels are replaced by their names; -1 is a missing one, and so is a cell of CSV without text.
        """
        with self._reading():
            for number, values in enumerate(self._data.select_columns(sorted(columns)), start=1):
                for column, names in self._labels.items():
                    label = values.get(column)
                    if label is not None:
                        values[column] = names[label] if 0 <= label < len(names) else None
                for column, feature in self._short.items():
                    if column in values:
                        values[column] = _shortened(feature, values[column])
                if self._is_csv:
                    values.update({column: None for column, cell in values.items() if not (cell and cell.strip())})
                yield FileRow(Place(self.path, "row", number), values)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except StreamlearnError:
            raise
        except Exception as error:  # whatever pandas, pyarrow and fsspec raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise SourceError(f"{self.path} must be readable by `datasets`, found: {reason}") from error


def _has_short_floats(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_has_short_floats, feature.values()))
    inner = getattr(feature, "feature", None)
    return _has_short_floats(inner) if inner is not None else getattr(feature, "dtype", "") in ("float16", "float32")


def _shortened(feature: Any, value: Any) -> Any:
    """Return 0.1 for the float32 that is nearest to it, which Python holds as 0.10000000149011612."""
    if value is None or not _has_short_floats(feature):
        return value
    if isinstance(feature, dict):
        return {name: _shortened(feature[name], item) for name, item in value.items()}
    if (inner := getattr(feature, "feature", None)) is not None:
        return [_shortened(inner, item) for item in value]
    return float(str(np.dtype(feature.dtype).type(value)))


def open_file(
    path: Path,
    *,
    split: str | None = None,
    subset: str | None = None,
    delimiter: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> RowFile:
    """Return a file in the format that its name says, JSONL if it says none; or the data set of a folder.

    Raises:
        UsageError: an option does not fit the format, the extra is missing, or the format is known not to be readable.
        SourceError: the file cannot be read.
    """
    suffix = _suffix(path)
    if path != STDIN and not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.is_dir():
        return DatasetFile(path, split=split, subset=subset)
    for option, value in (("split", split), ("subset", subset)):
        if value is not None:
            raise UsageError(f"--{option} chooses a part of a folder, but {path} is one file: leave it out")
    if delimiter is not None and _BUILDERS.get(suffix) != "csv":
        raise UsageError(f"--delimiter is for CSV, but {path} does not end in .csv or .tsv: leave it out")
    if suffix in _BUILDERS and _is_pipe(path):
        raise UsageError(f"{path} is a pipe, and only JSONL is read from one: write {suffix[1:]} to a file first")
    if suffix in _BUILDERS:
        return DatasetFile(path, delimiter=delimiter)
    if suffix in _REFUSED:
        raise UsageError(f"{path}: expected a folder, JSONL, or a file that ends in {', '.join(_BUILDERS)}: convert it")
    return JsonlFile(path, stopped=stopped)


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _datasets() -> Any:
    try:
        import datasets  # noqa: PLC0415 - an optional dependency
    except ModuleNotFoundError as error:
        raise UsageError(
            "CSV, Parquet, Arrow and folders need package datasets: pip install 'streamlearn[datasets]'"
        ) from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are raised too
    return datasets


def _load_file(path: Path, delimiter: str | None) -> Any:
    datasets, builder = _datasets(), _BUILDERS[_suffix(path)]
    options: dict[str, Any] = {"data_files": str(path), "split": "train", "streaming": True}
    if builder == "csv":  # every cell is text: 007 stays 007
        options |= {"delimiter": delimiter or ("\t" if _suffix(path) == ".tsv" else ","), "na_filter": False}
        columns: dict[str, Any] = next(iter(datasets.load_dataset(builder, **options)), {})
        options["features"] = datasets.Features({name: datasets.Value("string") for name in columns}) or None
    return datasets.load_dataset(builder, **options)


def _load_folder(path: Path, split: str | None, subset: str | None) -> Any:
    datasets = _datasets()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        if subset is not None:
            raise UsageError(f"--subset: {path} was written by save_to_disk and has no subsets: leave it out")
        loaded = datasets.load_from_disk(str(path))
    else:
        local = datasets.DownloadConfig(local_files_only=True)
        subsets = datasets.get_dataset_config_names(str(path), download_config=local)
        if subset is None and len(subsets) > 1:
            raise UsageError(f"{path} has several subsets: choose one with --subset ({', '.join(subsets)})")
        if subset not in (None, *subsets):
            raise UsageError(f"{path} has no subset {subset!r}: expected one of {', '.join(subsets)}")
        loaded = datasets.load_dataset(str(path), subset, streaming=True, download_config=local)
    splits = loaded if isinstance(loaded, dict) else {None: loaded}
    if split is None and len(splits) == 1:
        (split,) = splits
    names = ", ".join(filter(None, splits)) or "none"
    if split is None and None not in splits:
        raise UsageError(f"{path} has several splits: choose one with --split ({names})")
    if split not in splits:
        raise UsageError(f"{path} has no split {split!r}: expected one of {names}")
    data = splits[split]
    return data.to_iterable_dataset() if isinstance(data, datasets.Dataset) else data
