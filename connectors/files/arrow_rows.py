"""Arrow record batches as rows, and what Hugging Face datasets note in an Arrow schema."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from connectors.files.row_file import FileRow, Place
from streamlearn.errors import UsageError

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
