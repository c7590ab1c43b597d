"""Data sets in every format that `feed` reads."""

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from connectors.rows import FileRow, RowError, RowFile

ROWS: Sequence[dict[str, Any]] = [
    {"question": f"q {number}, or\nnot?", "answer": f"a{number}"} for number in range(600)
]
"""More than one slice, with a separator and a line break in every cell."""


def values(file: RowFile) -> list[dict[str, Any]]:
    rows = list(file.rows(file.columns or ()))
    assert not any(isinstance(row, RowError) for row in rows)
    return [dict(row.values) for row in rows if isinstance(row, FileRow)]


def write_jsonl(path: Path, rows: Sequence[object] = ROWS) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def write_csv(path: Path, rows: Sequence[dict[str, Any]] = ROWS, delimiter: str = ",") -> Path:
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=200)
    return path


def write_arrow(path: Path, table: Any = None, *, stream: bool = True) -> Path:
    table = pa.Table.from_pylist(list(ROWS)) if table is None else table
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    return path


def save_to_disk(folder: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    datasets.Dataset.from_list(list(rows)).save_to_disk(str(folder), num_shards=2)
    return folder
