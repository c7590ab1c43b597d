"""The history as one file of a snapshot, `history.json`: for each series its columns' names, and a list for each row.

A later release may add columns: where a file has none of a name, its rows get the default.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import orjson

from streamlearn.history.history import History
from streamlearn.snapshot.contents import read_bounded
from streamlearn.snapshot.part import SnapshotPart
from streamlearn.snapshot.snapshot import Snapshot
from streamlearn.status.history_status import (
    DeadLetterRow,
    HistoryPoint,
    RegimeSegment,
    RunFigures,
    SnapshotMark,
    StreamFigures,
)

NAME = "history.json"
MAX_BYTES = 64 << 20
"""Maximum size of the file in bytes: far more than bounded series take, and still quick to read."""
_NOT_STORED = "revision"  # a process counts its own

R = TypeVar("R")


def history_part(history: History) -> SnapshotPart:
    """The part of a snapshot that holds the history."""
    return SnapshotPart(NAME, lambda path: _write(path, to_json(history)))


def load_history(history: History, snapshot: Snapshot | None) -> None:
    """Go on from a snapshot, or begin anew. One of an earlier release has no history, and leaves it empty.

    Raises:
        SnapshotDamagedError: the file changed since it was verified.
        SnapshotError: this process cannot read it.
    """
    history.begin_again()
    if snapshot is not None and NAME in snapshot.manifest.files:
        load_json(history, orjson.loads(read_bounded(snapshot.path / NAME, MAX_BYTES)))


def to_json(history: History) -> dict[str, Any]:
    """What the file holds."""
    return {
        "points": {
            "columns": [*_columns(StreamFigures), *_columns(RunFigures)],
            "levels": [
                [[*_values(point.stream), *_values(point.run)] for point in level] for level in history.points.levels
            ],
        },
        "segments": {
            "columns": _columns(RegimeSegment),
            "levels": [[_values(segment) for segment in level] for level in history.segments.levels],
        },
        "dead_letters": {"columns": _columns(DeadLetterRow), "rows": [_values(row) for row in history.dead_letters]},
        "snapshots": {"columns": _columns(SnapshotMark), "rows": [_values(row) for row in history.snapshots]},
    }


def load_json(history: History, values: Mapping[str, Any]) -> None:
    """The inverse of `to_json`, into an empty history."""
    points, segments = values["points"], values["segments"]
    history.points.load([[_point(points["columns"], row) for row in level] for level in points["levels"]])
    history.segments.load([_rows(RegimeSegment, segments["columns"], level) for level in segments["levels"]])
    history.dead_letters.extend(_rows(DeadLetterRow, values["dead_letters"]["columns"], values["dead_letters"]["rows"]))
    history.snapshots.extend(_rows(SnapshotMark, values["snapshots"]["columns"], values["snapshots"]["rows"]))


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with path.open("xb") as file:
        file.write(orjson.dumps(values))


def _columns(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != _NOT_STORED]


def _values(row: Any) -> list[Any]:
    return [getattr(row, name) for name in _columns(type(row))]


def _rows(kind: type[R], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[R]:
    return [_row(kind, dict(zip(columns, row, strict=True))) for row in rows]


def _row(kind: type[R], values: Mapping[str, Any]) -> R:
    return kind(**{name: _tuples(values[name]) for name in _columns(kind) if name in values})


def _point(columns: Sequence[str], row: Sequence[Any]) -> HistoryPoint:
    values = dict(zip(columns, row, strict=True))
    return HistoryPoint(_row(StreamFigures, values), _row(RunFigures, values))


def _tuples(value: Any) -> Any:
    """Lists, which JSON has in place of tuples, as tuples."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
