"""The records of one or several files, in order."""

import base64
import csv
import difflib
import gzip
import io
import os
import re
import string
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self, cast

import orjson

from connectors.jsonl import MAX_LINE_BYTES, READ_ERRORS, LineReader
from streamlearn.errors import SourceError, UsageError


class ColumnText:
    """What one field of a record is made of.

    >>> ColumnText("{question} ({topic})").of({"question": "Why?", "topic": "sky"})
    'Why? (sky)'
    """

    def __init__(self, option: str, expression: str) -> None:
        """Read an expression: the name of a column, or text with names in braces (`{{` is a brace).

        Raises:
            UsageError: it is empty, or a brace is not closed or holds more than a name.
        """
        self._parts: list[tuple[str, str | None]] = [("", expression)]
        if "{" in expression or "}" in expression:
            self._parts = list(_parsed(option, expression))
        self.columns = tuple(name for _, name in self._parts if name is not None)
        if not all(self.columns) or not self.columns:
            raise UsageError(f"{option}: expected a column, or text with columns in braces, found {expression!r}")

    @property
    def is_column(self) -> bool:
        """Whether it is one column as it stands."""
        return len(self._parts) == 1 and not self._parts[0][0]

    def of(self, values: Mapping[str, Any]) -> str:
        """Return the text for a row.

        Raises:
            TypeError: a value is neither text nor a number; the message names its column.
        """
        return "".join(text + ("" if name is None else as_text(name, values[name])) for text, name in self._parts)


def as_text(column: str, value: object) -> str:
    """Return text as it stands, and numbers and booleans as JSON writes them.

    Raises:
        TypeError: anything else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return orjson.dumps(value).decode()
    raise TypeError(
        f"column {column!r} must be text or a number, found {'null' if value is None else type(value).__name__}"
    )


def _parsed(option: str, expression: str) -> list[tuple[str, str | None]]:
    try:
        parts = list(string.Formatter().parse(expression))
    except ValueError as error:
        raise UsageError(f"{option}: {error} in {expression!r}; write {{{{ for a brace") from error
    if any(form or conversion for _, _, form, conversion in parts):
        raise UsageError(f"{option}: expected only names in braces, found {expression!r}")
    return [(text, name) for text, name, _, _ in parts]


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


TEXTS = ("text", "prompt", "completion")
"""Fields that may be templates."""
_VALUES = ("messages", "input_ids", "labels", "image", "meta")
"""Fields that are one column's value as it stands."""
FORMS = ({"prompt", "completion"}, {"messages"}, {"text"}, {"input_ids", "labels"}, {"input_ids"})
"""Fields of a record without image and meta; in a file without a mapping the first form whose columns exist."""


class ColumnMapping:
    """The fields of a record and the columns that they come from."""

    def __init__(self, fields: Mapping[str, str], meta: Sequence[str] = ()) -> None:
        """Take the columns, or templates, by field.

        Args:
            fields: Field of the record to name of a column; `TEXTS` also to a template.
            meta: Columns that pass through in the record's `meta`.

        Raises:
            UsageError: these fields do not make a record.
        """
        if set(fields) - {"image", "meta"} not in FORMS or (
            "image" in fields and not fields.keys() & {"prompt", "messages"}
        ):
            raise UsageError(
                "expected columns for --text, for --prompt and --completion, or for --messages (and --image beside the "
                f"last two), found {' and '.join(f'--{name}' for name in fields) or 'none'}"
            )
        self._texts = {name: ColumnText(f"--{name}", column) for name, column in fields.items() if name in TEXTS}
        self._values = {name: column for name, column in fields.items() if name in _VALUES}
        self._meta = tuple(meta)
        texts = (column for text in self._texts.values() for column in text.columns)
        self.columns: frozenset[str] = frozenset((*texts, *self._values.values(), *self._meta))
        """Every column that is read."""

    @classmethod
    def by_name(cls, columns: Collection[str], path: Path, meta: Sequence[str] = ()) -> Self:
        """The mapping of a file whose columns are named like a record's fields; others are left out.

        Raises:
            UsageError: no form of a record is among the columns.
        """
        form = next((form for form in FORMS if form <= set(columns)), None)
        if form is None:
            raise UsageError(
                f"{path} has no columns named like a record's fields: found {_listed(columns)}. Name them, for example "
                "--prompt COLUMN --completion COLUMN, or --text COLUMN"
            )
        extra = {"image"} if form & {"prompt", "messages"} else set()
        extra |= set() if meta else {"meta"}
        return cls({name: name for name in sorted(form | extra) if name in columns}, meta)

    def check(self, columns: Collection[str], where: Path | Place) -> None:
        """Check that a file or a row has every column.

        Raises:
            UsageError: one is missing; names the nearest one and all that there are.
        """
        for name in sorted(self.columns - set(columns)):
            near = difflib.get_close_matches(name, list(columns), n=1, cutoff=0.5)
            hint = f", did you mean {near[0]!r}?" if near else "."
            one = next(iter(columns), "") if len(columns) == 1 else ""
            advice = " The columns may be separated otherwise: add --delimiter" if {";", "\t", "|"} & set(one) else ""
            raise UsageError(f"{where} has no column {name!r}{hint} Its columns are {_listed(columns)}.{advice}")

    def record(self, row: FileRow) -> bytes:
        """Return the record that a row becomes, as JSON.

        Raises:
            RowError: the row lacks a column, or a value cannot be what the record needs.
        """
        try:
            self.check(row.values.keys(), row.place)
            record: dict[str, Any] = {name: text.of(row.values) for name, text in self._texts.items()}
            for name, column in self._values.items():
                value = _value(name, column, row.values[column])
                if value is not None:
                    record[name] = value
            if self._meta:
                record["meta"] = {column: row.values[column] for column in self._meta}
            return orjson.dumps(record, default=str)
        except UsageError as error:
            raise RowError(str(error)) from error
        except (TypeError, orjson.JSONEncodeError) as error:
            raise RowError(f"{row.place}: {error}. Correct the row") from error

    def __str__(self) -> str:
        fields = [f"{name} from {', '.join(map(repr, text.columns))}" for name, text in self._texts.items()]
        fields += [f"{name} from {column!r}" for name, column in self._values.items()]
        fields += [f"meta from {', '.join(map(repr, self._meta))}"] if self._meta else []
        return "; ".join(fields)


def _value(name: str, column: str, value: object) -> Any:
    if name == "image":
        images = [_image(column, each) for each in value] if isinstance(value, list) else _image(column, value)
        return images or None
    if value is None and name in ("meta", "labels"):
        return None
    if isinstance(value, str) and name != "meta":  # a cell of CSV
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise TypeError(f"column {column!r} must hold JSON for {name}, found {error}") from error
    if name == "messages" and isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if name != "meta" and not isinstance(value, list):
        raise TypeError(f"column {column!r} must hold a list for {name}, found {type(value).__name__}")
    return value


def _image(column: str, value: object) -> str | None:
    """Base64 of an image's bytes: those of a Hugging Face image or of a binary column; text is base64 already."""
    if isinstance(value, Mapping):
        value = value.get("bytes")
        if value is None:
            raise TypeError(f"column {column!r} must hold the image's bytes, found a path: embed the files first")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, str):
        return value or None
    raise TypeError(f"column {column!r} must hold images, found {type(value).__name__}")


def _without_nulls(message: object) -> object:
    """A message without the keys that Arrow fills with null because other messages have them."""
    return {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message


def _listed(columns: Collection[str]) -> str:
    return ", ".join(map(repr, columns)) or "none"


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


SLICE_ROWS = 256
"""Rows that are turned into Python values at a time."""


def pyarrow() -> Any:
    """Import pyarrow, with its modules for IPC and Parquet.

    Raises:
        UsageError: the extra is not installed.
    """
    try:
        import pyarrow.ipc  # noqa: PLC0415 - an optional dependency
        import pyarrow.parquet  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UsageError("Parquet and Arrow files need package pyarrow: pip install 'streamlearn[parquet]'") from error
    return pyarrow


def rows_of(path: Path, batches: Iterable[Any], schema: Any) -> Iterator[FileRow]:
    """Yield the rows of record batches, numbered from 1; class labels are replaced by their names."""
    names = class_names(schema)
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, SLICE_ROWS):
            for values in batch.slice(start, SLICE_ROWS).to_pylist():
                number += 1
                yield FileRow(Place(path, "row", number), named(values, names))


def class_names(schema: Any) -> dict[str, list[str]]:
    """The names of each column of class labels, as Hugging Face datasets store them in the schema's metadata."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    try:
        features = orjson.loads(metadata or b"{}").get("info", {}).get("features", {})
        return {
            column: feature["names"]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (orjson.JSONDecodeError, AttributeError):
        return {}


def named(values: Mapping[str, Any], names: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the row with names for its class labels; -1 is a missing label.

    >>> named({"label": 1, "text": "a"}, {"label": ["no", "yes"]})
    {'label': 'yes', 'text': 'a'}
    """
    row = dict(values)
    for column, labels in names.items():
        label = row.get(column)
        if isinstance(label, int):
            row[column] = labels[label] if 0 <= label < len(labels) else None
    return row


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


# Which files a data set's folder holds, in order.
#
# Two layouts are known: what Hugging Face's `save_to_disk` writes (`state.json` beside Arrow files, and for several
# splits `dataset_dict.json` above one such folder each), and any folder of data files, such as a copy of a hub
# repository.


SUFFIXES = (".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz")
"""Names that data files end in."""

_SPLIT = re.compile(r"(?:^|[-_./ ])(train|validation|valid|val|dev|test)(?=[-_./ ]|$)")


def data_files(folder: Path, split: str | None) -> list[Path]:
    """Return the data files of a folder, of one split if it has several.

    Raises:
        UsageError: there are none, or the split is not among those of the folder.
        SourceError: the folder's description cannot be read.
    """
    if (folder / "dataset_dict.json").exists():
        splits = _read(folder / "dataset_dict.json", "splits")
        return _saved(folder / _chosen(folder, split, [str(each) for each in splits]))
    if (folder / "state.json").exists():
        return _saved(folder)
    files = sorted(path for path in folder.rglob("*") if _is_data(path.relative_to(folder)) and path.is_file())
    if not files:
        raise UsageError(f"{folder}: expected files that end in {', '.join(SUFFIXES)}, found none")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    return by_split[_chosen(folder, split, sorted(by_split))] if split or len(by_split) > 1 else files


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of a data set that was saved to disk."""
    files = _read(folder / "state.json", "_data_files")
    try:
        return [folder / Path(each["filename"]).name for each in files]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{folder / 'state.json'} must name data files, found {files!r}: save it again") from error


def _read(path: Path, key: str) -> list[Any]:
    try:
        return list(orjson.loads(path.read_bytes())[key])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise SourceError(f"{path} must hold a list {key!r}, as save_to_disk writes it, found {error!r}") from error


def _chosen(folder: Path, split: str | None, splits: list[str]) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None:
        raise UsageError(f"{folder} has several splits: choose one with --split ({', '.join(filter(None, splits))})")
    if split not in splits:
        raise UsageError(
            f"{folder} has no split {split!r}: expected one of {', '.join(filter(None, splits)) or 'none'}"
        )
    return split


def _is_data(relative: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in relative.parts)
    return not hidden and relative.name.endswith(SUFFIXES)


def _split_of(relative: Path) -> str:
    """The split that a file's name or folder says, as the hub's layouts do; empty if none.

    >>> _split_of(Path("data/train-00000-of-00002.parquet")), _split_of(Path("rows.csv"))
    ('train', '')
    """
    found = _SPLIT.search(relative.as_posix())
    return found[1] if found else ""


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


def open_files(path: Path, *, split: str | None = None, delimiter: str | None = None) -> Sequence[RowFile]:
    """Return the files at a path: itself, or those of a data set's folder.

    Raises:
        UsageError: the folder holds no data files, the split is not known, or an extra is missing.
        SourceError: a file cannot be read.
    """
    if not path.is_dir():
        if split is not None:
            raise UsageError(f"--split chooses among the files of a folder, but {path} is one file: leave it out")
        return [open_file(path, delimiter)]
    return [open_file(each, delimiter) for each in data_files(path, split)]


def open_file(path: Path, delimiter: str | None = None) -> RowFile:
    """Return a file in the format that its name says; JSONL if it says none.

    Raises:
        UsageError: the format needs an extra that is missing, or is known not to be readable.
        SourceError: the file cannot be read.
    """
    name = path.name.removesuffix(".gz")
    suffix = Path(name).suffix.lower()
    if suffix in (".csv", ".tsv"):
        return CsvFile(path, delimiter or ("\t" if suffix == ".tsv" else ","))
    if delimiter is not None:
        raise UsageError(f"--delimiter is for CSV, but {path} does not end in .csv or .tsv: leave it out")
    if suffix == ".parquet":
        return ParquetFile(path)
    if suffix in (".arrow", ".feather"):
        return ArrowFile(path)
    if suffix in (".json", ".xlsx", ".zip", ".zst", ".bz2", ".xz"):
        raise UsageError(f"{path}: expected a folder, or a file that ends in {', '.join(SUFFIXES)}: convert it first")
    return JsonlFile(path)
