"""From a row to a record: which columns become which field."""

import base64
import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import orjson

from connectors.files.column_text import ColumnText
from connectors.files.row_file import FileRow, Place, RowError
from streamlearn.errors import UsageError

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
