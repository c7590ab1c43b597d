"""Columns of a row as fields of a record."""

import base64
import difflib
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import orjson

from connectors.rows import FeedRecord, FileRow, JsonlFile, Place, RowError, RowFile
from streamlearn.errors import RecordError, SourceError, UsageError
from streamlearn.settings.records import braced_names, is_template
from streamlearn.stream.record import FORMS, kto_label


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
        try:
            if is_template(expression):
                self._parts = braced_names(expression, what="columns")
        except ValueError as error:
            raise UsageError(f"{option}: {error}") from error
        self.columns = tuple(name for _, name in self._parts if name is not None)
        self.is_column = self._parts == [("", expression)]
        """Whether it is one column as it stands."""
        if not all(self.columns) or not self.columns:
            raise UsageError(f"{option}: expected a column, or text with columns in braces, found {expression!r}")

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text for a row: text as it stands, numbers, dates and times as a person writes them.

        Raises:
            TypeError: a value is missing or of another type; the message names its column.
        """
        return "".join(text + ("" if name is None else _as_text(name, values[name])) for text, name in self._parts)


def _as_text(column: str, value: object) -> str:
    match value:
        case str():
            return value
        case float() if not math.isfinite(value):
            raise TypeError(f"column {column!r} must have a value, found {value}")
        case bool() | float():
            return orjson.dumps(value).decode()
        case int():
            return str(value)
        case Decimal() if value.is_finite():
            return f"{value:f}"
        case datetime() | date() | time():
            return value.isoformat()
    found = "null" if value is None else "NaN" if value != value else type(value).__name__  # noqa: PLR0124 - a decimal's
    raise TypeError(f"column {column!r} must be text or a number, found {found}")


_WITH_IMAGES = {"image", "tools"}
"""Fields that may come with the forms that take images."""


class ColumnMapping:
    """The fields of a record and the columns that they come from."""

    def __init__(self, fields: Mapping[str, str], meta: Sequence[str] = (), passed: Collection[str] = ()) -> None:
        """Take the columns, or templates, by field.

        Args:
            fields: Field of the record to name of a column; that of a text also to a template.
            meta: Columns that pass through in the record's `meta`.
            passed: Columns that are passed on under their own name by rows that have them, unless a field is made of
                them: KTO's label, for example.

        Raises:
            UsageError: these fields do not make a record.
        """
        form = next((form for form in FORMS if form.is_made_by(set(fields) - {"meta", *_WITH_IMAGES})), None)
        if form is None or (_WITH_IMAGES & set(fields) and not form.takes_images):
            raise UsageError(
                "expected columns for --text, for --prompt and --completion, or for --messages (and --image and "
                f"--tools with the last two), found {' and '.join(f'--{name}' for name in fields) or 'none'}"
            )
        texts = form.fields if form.is_text else ()
        self._texts = {name: ColumnText(f"--{name}", column) for name, column in fields.items() if name in texts}
        self._values = {name: column for name, column in fields.items() if name not in texts}
        self._meta = tuple(meta)
        in_texts = (column for text in self._texts.values() for column in text.columns)
        in_fields = {*in_texts, *self._values.values()}
        self._required = in_fields | {*meta}
        self._passed = tuple(sorted({*passed} - in_fields - ({"label"} if "text" in fields else set())))
        self.columns: frozenset[str] = frozenset((*self._required, *self._passed))
        """Every column that is read."""

    @classmethod
    def by_name(
        cls, columns: Collection[str], path: Path, meta: Sequence[str] = (), passed: Collection[str] = ()
    ) -> Self:
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
        names = [*form.fields, *(sorted(_WITH_IMAGES) if form.takes_images else []), *([] if meta else ["meta"])]
        fields = {name: name for name in names if name in columns}
        if form.takes_images and "images" in columns:
            fields.setdefault("image", "images")
        return cls(fields, meta, passed)

    def check(self, columns: Collection[str], where: Path | Place) -> None:
        """Check that a file or a row has every column.

        Raises:
            UsageError: one is missing; names the nearest one and all that there are.
        """
        for name in sorted(self._required - set(columns)):
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
            record: dict[str, Any] = {name: _text(text, row.values) for name, text in self._texts.items()}
            for name, column in self._values.items():
                value = _value(name, column, row.values[column])
                if value is not None:
                    record[name] = value
            passed = {name: row.values.get(name) for name in self._passed}
            if kto_label(passed.get("label")) is None:
                passed.pop("label", None)
            record |= without_missing(passed)
            if self._meta:
                record["meta"] = without_missing({column: row.values[column] for column in self._meta})
            return orjson.dumps(record, default=_written)
        except UsageError as error:
            raise RowError(str(error)) from error
        except (TypeError, RecursionError, orjson.JSONEncodeError) as error:
            raise RowError(f"{row.place}: {error}. Correct the row") from error

    def __str__(self) -> str:
        fields = [f"{name} from {', '.join(map(repr, text.columns))}" for name, text in self._texts.items()]
        fields += [f"{name} from {column!r}" for name, column in self._values.items()]
        fields += [f"{name} from {name!r}" for name in self._passed]
        fields += [f"meta from {', '.join(map(repr, self._meta))}"] if self._meta else []
        return "; ".join(fields)


def _text(text: ColumnText, values: Mapping[str, Any]) -> Any:
    """A text, or the list of messages in the column of a conversational prompt or completion."""
    if text.is_column:
        value = values[text.columns[0]]
        if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
            return without_missing(value)
    return text.fill(values)


def _value(name: str, column: str, value: object) -> Any:
    """What a field that is no text gets from a column's value; None to leave the field out."""
    if name == "image":
        images = [_image(column, image) for image in value] if isinstance(value, list) else _image(column, value)
        return images or None
    if value is None and name in ("meta", "labels", "tools"):
        return None
    if isinstance(value, str) and name != "meta":  # a cell of CSV
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise TypeError(f"column {column!r} must hold JSON for {name}, found {error}") from error
    if name != "meta" and not isinstance(value, list):
        found = "null" if value is None else type(value).__name__
        raise TypeError(f"column {column!r} must hold a list for {name}, found {found}")
    return value if name in ("input_ids", "labels") else without_missing(value)


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


def without_missing(value: Any) -> Any:
    """Return a value without the keys that are null, as Arrow fills them, or no number; at any depth.

    A message keeps its `content: null`, which says that it has none beside its tool calls.
    """
    if isinstance(value, Mapping):
        kept = {key: without_missing(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None or (key == "content" and "role" in kept)}
    if isinstance(value, list):
        return [without_missing(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _written(value: object) -> str:
    """What JSON has no form for, as text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | time):
        return value.isoformat()
    return f"{value:f}" if isinstance(value, Decimal) and value.is_finite() else str(value)


def _listed(columns: Collection[str]) -> str:
    return ", ".join(map(repr, columns)) or "none"


class WholeRows:
    """Rows as they stand, for a configuration whose section `records` maps their columns."""

    def __init__(self, columns: Collection[str]) -> None:
        self.columns = frozenset(columns)

    def check(self, columns: Collection[str], where: Path | Place) -> None:
        """Accept any columns: the configuration's mapping names what it misses."""

    def record(self, row: FileRow) -> bytes:
        try:
            return orjson.dumps(without_missing(row.values), default=_written)
        except (TypeError, RecursionError, orjson.JSONEncodeError) as error:
            raise RowError(f"{row.place}: {error}. Correct the row") from error

    def __str__(self) -> str:
        return f"{_listed(sorted(self.columns))}, mapped by the configuration"


Check = Callable[[bytes], None]
"""Raises RecordError for a record that the daemon would refuse."""


class Records:
    """The records of a file: its rows through a mapping, or, without one, the lines of JSONL as they stand."""

    def __init__(
        self,
        file: RowFile,
        mapping: ColumnMapping | WholeRows | None,
        *,
        skip_bad_rows: bool = False,
        check: Check | None = None,
    ) -> None:
        """Check that the file has the columns.

        Args:
            file: Where the rows come from.
            mapping: Which columns become which field; None only for JSONL.
            skip_bad_rows: Whether to leave out rows that cannot become records, or that `check` refuses.
            check: Applied to each record; None accepts all.

        Raises:
            UsageError: the file lacks a column.
        """
        if mapping is not None and file.columns is not None:
            mapping.check(file.columns, file.path)
        self.mapping = mapping
        self.is_pipe = file.is_pipe
        """Whether the file can be read only once."""
        self.num_trusted = 0
        """Records at the beginning of the file that need no check."""
        self.refused: Counter[str] = Counter()
        """Rows that were left out, by reason."""
        self.first_refused: dict[str, str] = {}
        """The first error of each reason."""
        self._file = file
        self._skip_bad_rows = skip_bad_rows
        self._check = check

    def __iter__(self) -> Generator[FeedRecord]:
        """Read the file from the beginning, a pipe from where the last reading ended.

        Raises:
            SourceError: a row cannot become a record, or the file cannot be read.
        """
        number = 0
        for row in self._rows():
            record = row
            if isinstance(row, FeedRecord) and number >= self.num_trusted:
                record = self._checked(row)
            if isinstance(record, FeedRecord):
                number += 1
                yield record
                continue
            if not self._skip_bad_rows:
                raise SourceError(f"{record}, or leave such rows out with --skip-bad-rows") from record
            self.refused[record.reason] += 1
            self.first_refused.setdefault(record.reason, str(record))

    @property
    def fraction(self) -> float | None:
        return self._file.fraction

    def _rows(self) -> Iterator[FeedRecord | RowError]:
        if self.mapping is None:
            assert isinstance(self._file, JsonlFile), "files in other formats need a mapping"
            yield from self._file.lines()
            return
        for row in self._file.rows(self.mapping.columns):
            try:
                yield row if isinstance(row, RowError) else FeedRecord(self.mapping.record(row), row.place)
            except RowError as error:
                yield error

    def _checked(self, record: FeedRecord) -> FeedRecord | RowError:
        try:
            if self._check is not None:
                self._check(record.value)
        except RecordError as error:
            end = "" if str(error).endswith((".", "?")) else "."
            return RowError(f"{record.place}: {error}{end} Correct the {record.place.unit}", error.reason)
        return record
