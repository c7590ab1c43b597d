"""Rows of files as records: lines of JSONL as they stand, or columns of any format mapped to a record's fields.

JSONL is read here. CSV, Parquet, Arrow and the folders of data sets are read as a stream by Hugging Face `datasets`, an
optional dependency.
"""

import base64
import difflib
import string
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import orjson

from connectors.jsonl import LineReader
from streamlearn.errors import SourceError, StreamlearnError, UsageError
from streamlearn.stream.record import FORMS

_BUILDERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
"""End of a file's name -> the reader of `datasets`; .gz may follow it for csv and tsv."""
_REFUSED = (".json", ".xlsx", ".zip", ".zst", ".bz2", ".xz")


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


class RowFile(Protocol):
    """A file or folder that can be read again and again from its first row, in bounded memory."""

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
    def fraction(self) -> float | None:
        """Share of the file that the newest `rows` has read, 0 to 1; None if its size is not known."""


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

    def lines(self) -> Iterator[FeedRecord]:
        """Yield each line as it stands, without its newline.

        Raises:
            SourceError: the file is damaged after the last line.
        """
        self._reader = reader = LineReader(self.path)
        try:
            while (line := reader.next_line()) is not None:
                if line.strip():
                    yield FeedRecord(line, Place(self.path, "line", reader.number))
        finally:
            reader.close()

    def rows(self, columns: Collection[str]) -> Iterator[FileRow | RowError]:
        """Yield each line's object; see `RowFile`."""
        del columns  # a line is parsed as a whole
        for line, place in self.lines():
            try:
                values = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                yield RowError(f"{place} must be a JSON object, found: {error}. Correct the line")
                continue
            if isinstance(values, dict):
                yield FileRow(place, values)
            else:
                yield RowError(f"{place} must be a JSON object, found {type(values).__name__}. Correct the line")

    @property
    def fraction(self) -> float:
        return self._reader.fraction


class DatasetFile:
    """CSV, Parquet, Arrow, or a folder: of data files, or as `save_to_disk` writes it."""

    fraction = None

    def __init__(self, path: Path, *, split: str | None = None, delimiter: str | None = None) -> None:
        """Open the file and learn its columns.

        Raises:
            UsageError: `datasets` is not installed, or the split is not one of the folder's.
            SourceError: it cannot be read.
        """
        self.path = path
        with self._reading():
            data = _load_folder(path, split) if path.is_dir() else _load_file(path, delimiter)
            self.columns = tuple(data.column_names or next(iter(data), {}))
            features = data.features or {}
        self._labels = {name: feature.names for name, feature in features.items() if hasattr(feature, "int2str")}
        self._data = data.decode(False) if features else data  # images stay bytes

    def rows(self, columns: Collection[str]) -> Iterator[FileRow]:
        """Yield the rows; class labels are replaced by their names, and -1 is a missing label."""
        with self._reading():
            for number, values in enumerate(self._data.select_columns(sorted(columns)), start=1):
                for column, names in self._labels.items():
                    label = values.get(column)
                    if label is not None:
                        values[column] = names[label] if 0 <= label < len(names) else None
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


def open_file(path: Path, *, split: str | None = None, delimiter: str | None = None) -> RowFile:
    """Return a file in the format that its name says, JSONL if it says none; or the data set of a folder.

    Raises:
        UsageError: an option does not fit the format, the extra is missing, or the format is known not to be readable.
        SourceError: the file cannot be read.
    """
    suffix = _suffix(path)
    if path.is_dir():
        return DatasetFile(path, split=split)
    if split is not None:
        raise UsageError(f"--split chooses among the splits of a folder, but {path} is one file: leave it out")
    if delimiter is not None and _BUILDERS.get(suffix) != "csv":
        raise UsageError(f"--delimiter is for CSV, but {path} does not end in .csv or .tsv: leave it out")
    if suffix in _BUILDERS:
        return DatasetFile(path, delimiter=delimiter)
    if suffix in _REFUSED:
        raise UsageError(f"{path}: expected a folder, JSONL, or a file that ends in {', '.join(_BUILDERS)}: convert it")
    return JsonlFile(path)


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


def _load_folder(path: Path, split: str | None) -> Any:
    datasets = _datasets()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        loaded = datasets.load_from_disk(str(path))
    else:
        local = datasets.DownloadConfig(local_files_only=True)
        loaded = datasets.load_dataset(str(path), streaming=True, download_config=local)
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


class ColumnText:
    """What one field of a record is made of.

    >>> ColumnText("--prompt", "{question} ({topic})").fill({"question": "Why?", "topic": "sky"})
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

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text for a row: text as it stands, numbers and booleans as JSON writes them.

        Raises:
            TypeError: a value is neither text nor a number; the message names its column.
        """
        return "".join(text + ("" if name is None else _as_text(name, values[name])) for text, name in self._parts)


def _parsed(option: str, expression: str) -> list[tuple[str, str | None]]:
    try:
        parts = list(string.Formatter().parse(expression))
    except ValueError as error:
        raise UsageError(f"{option}: {error} in {expression!r}; write {{{{ for a brace") from error
    if any(form or conversion for _, _, form, conversion in parts):
        raise UsageError(f"{option}: expected only names in braces, found {expression!r}")
    return [(text, name) for text, name, _, _ in parts]


def _as_text(column: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return orjson.dumps(value).decode()
    raise TypeError(
        f"column {column!r} must be text or a number, found {'null' if value is None else type(value).__name__}"
    )


class ColumnMapping:
    """The fields of a record and the columns that they come from."""

    def __init__(self, fields: Mapping[str, str], meta: Sequence[str] = ()) -> None:
        """Take the columns, or templates, by field.

        Args:
            fields: Field of the record to name of a column; that of a text also to a template.
            meta: Columns that pass through in the record's `meta`.

        Raises:
            UsageError: these fields do not make a record.
        """
        form = next((form for form in FORMS if form.is_made_by(set(fields) - {"image", "meta"})), None)
        if form is None or ("image" in fields and not form.takes_images):
            raise UsageError(
                "expected columns for --text, for --prompt and --completion, or for --messages (and --image with the "
                f"last two), found {' and '.join(f'--{name}' for name in fields) or 'none'}"
            )
        texts = form.fields if form.is_text else ()
        self._texts = {name: ColumnText(f"--{name}", column) for name, column in fields.items() if name in texts}
        self._values = {name: column for name, column in fields.items() if name not in texts}
        self._meta = tuple(meta)
        in_texts = (column for text in self._texts.values() for column in text.columns)
        self.columns: frozenset[str] = frozenset((*in_texts, *self._values.values(), *self._meta))
        """Every column that is read."""

    @classmethod
    def by_name(cls, columns: Collection[str], path: Path, meta: Sequence[str] = ()) -> Self:
        """The mapping of a file whose columns are named like a record's fields; others are left out.

        Raises:
            UsageError: no form of a record is among the columns.
        """
        form = next((form for form in FORMS if set(form.required) <= set(columns)), None)
        if form is None:
            raise UsageError(
                f"{path} has no columns named like a record's fields: found {_listed(columns)}. Name them, for example "
                "--prompt COLUMN --completion COLUMN, or --text COLUMN"
            )
        names = [*form.fields, *(["image"] if form.takes_images else []), *([] if meta else ["meta"])]
        return cls({name: name for name in names if name in columns}, meta)

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
            record: dict[str, Any] = {name: text.fill(row.values) for name, text in self._texts.items()}
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
    """What a field that is no text gets from a column's value; None to leave the field out."""
    if name == "image":
        images = [_image(column, image) for image in value] if isinstance(value, list) else _image(column, value)
        return images or None
    if value is None and name in ("meta", "labels"):
        return None
    if isinstance(value, str) and name != "meta":  # a cell of CSV
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise TypeError(f"column {column!r} must hold JSON for {name}, found {error}") from error
    if name == "messages" and isinstance(value, list):
        return [_without_nulls(message) for message in value]
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


class Records:
    """The records of a file: its rows through a mapping, or, without one, the lines of JSONL as they stand."""

    def __init__(self, file: RowFile, mapping: ColumnMapping | None, *, skip_bad_rows: bool = False) -> None:
        """Check that the file has the columns.

        Args:
            file: Where the rows come from.
            mapping: Which columns become which field; None only for JSONL.
            skip_bad_rows: Whether to leave out rows that cannot become records.

        Raises:
            UsageError: the file lacks a column.
        """
        if mapping is not None and file.columns is not None:
            mapping.check(file.columns, file.path)
        self.mapping = mapping
        self.num_skipped = 0
        """Rows that were left out."""
        self._file = file
        self._skip_bad_rows = skip_bad_rows

    def __iter__(self) -> Generator[FeedRecord]:
        """Read the file from the beginning.

        Raises:
            RowError: a row cannot become a record.
            SourceError: the file cannot be read.
        """
        if self.mapping is None:
            assert isinstance(self._file, JsonlFile), "files in other formats need a mapping"
            yield from self._file.lines()
            return
        for row in self._file.rows(self.mapping.columns):
            try:
                if isinstance(row, RowError):
                    raise row
                record = FeedRecord(self.mapping.record(row), row.place)
            except RowError as error:
                if not self._skip_bad_rows:
                    raise SourceError(f"{error}, or leave such rows out with --skip-bad-rows") from error
                self.num_skipped += 1
            else:
                yield record

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
    def fraction(self) -> float | None:
        return self._file.fraction
