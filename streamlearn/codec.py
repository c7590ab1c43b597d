"""The codec of saved state: a tree of dataclasses becomes named arrays and JSON, and back, by type hints.

    arrays, json = dump(state)
    state = load(State, arrays, json)

Supported are dataclasses, named tuples, tuples, lists, sets, dicts, enums, NumPy arrays, bytes, str, int, float, bool
and `X | None`. Everything is stored as columns: the values of one field, of all records in a list, are one array or
one JSON list, so the number of arrays does not grow with the number of records. The root is a column of one value.

    regimes: list[Regime]        regimes[lengths]      int64       number of regimes in each list
      visits: int                regimes[].visits      int64[N]    one entry per regime
      counts: NDArray            regimes[].counts      float32[N, B]
      sample: NDArray            regimes[].sample, regimes[].sample[lengths]    arrays of different lengths, joined
      name: int | None           regimes[].name[present], regimes[].name        only the values that are present

Text, enums and columns of a single number are in the JSON, other columns in the arrays. A field that was not saved
takes its default; one that the type does not have is an error. Fields with `init=False` or `metadata=NOT_SAVED` are
left out. Floats keep every bit, apart from the payload of a NaN outside of arrays.
"""

import json
import math
import sys
from collections import Counter, abc, deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import islice
from operator import index
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
Json = Any
T = TypeVar("T")

NOT_SAVED: Mapping[str, bool] = MappingProxyType({"saved": False})
"""Metadata of a dataclass field that is left out and takes its default when it is loaded."""
_SEQUENCES = {abc.Sequence: tuple, abc.Collection: tuple, list: list, set: set, frozenset: frozenset, deque: deque}
_MAPPINGS = {abc.Mapping: dict, dict: dict, Counter: Counter}
_DTYPES = {bool: np.bool_, int: np.int64, float: np.float64}


class CodecError(ValueError):
    """Arrays and JSON do not describe a value of the requested type; the message names the field."""


def dump(value: Any, hint: Any = None) -> tuple[dict[str, NDArray[Any]], Json]:
    """Arrays and JSON of a value of type `hint`, by default its own type. Arrays may share memory with the value."""
    writer = _Writer()
    tree = writer.column("", type(value) if hint is None else hint, [value])
    return writer.arrays, tree


def load(hint: type[T], arrays: Arrays, tree: Json) -> T:
    """The inverse of `dump`; the value shares no memory with `arrays`.

    Raises:
        CodecError: a field is unknown, missing without a default, or damaged.
    """
    reader = _Reader(arrays)
    try:
        [value] = reader.column("", hint, tree, 1)
    except CodecError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise CodecError(f"{reader.at or 'the whole'}: {error}") from error
    if unknown := sorted(arrays.keys() - reader.read):
        raise CodecError(f"{unknown[0]}: unknown array")
    loaded: T = value
    return loaded


def dump_json(value: Any) -> Json:
    """The JSON of a value that holds no arrays, with all numbers in it; `load` reads it with arrays `{}`."""
    writer = _Writer(max_numbers=sys.maxsize)
    tree = writer.column("", type(value), [value])
    assert not writer.arrays, f"{type(value).__name__} holds arrays"
    return tree


def to_arrays(value: Any) -> dict[str, NDArray[Any]]:
    """The arrays of `dump` with its JSON as one of them, for a file that holds arrays only."""
    arrays, tree = dump(value)
    return {**arrays, "json": np.frombuffer(json.dumps(tree).encode(), dtype=np.uint8).copy()}


def from_arrays(hint: type[T], arrays: Arrays) -> T:
    """The inverse of `to_arrays`.

    Raises:
        CodecError: the arrays do not describe a value of this type.
    """
    others = {name: array for name, array in arrays.items() if name != "json"}
    try:
        tree = json.loads(arrays["json"].tobytes())
    except (KeyError, ValueError) as error:
        raise CodecError(
            f"json: expected the structure of the arrays, found {type(error).__name__}: {error}"
        ) from error
    return load(hint, others, tree)


class _Kind(NamedTuple):
    """How values of one type are stored."""

    name: str
    make: Any = None
    """Its constructor."""
    items: tuple[Any, ...] = ()
    """Types of what it holds."""


@cache
def _kind(hint: Any) -> _Kind:  # noqa: C901, PLR0911  one case per kind of type
    origin, arguments = get_origin(hint), get_args(hint)
    if (alias := getattr(origin or hint, "__value__", None)) is not None:  # as NDArray is from NumPy 2.5 on
        return _kind(alias)
    if origin in (Union, UnionType):
        inner = tuple(argument for argument in arguments if argument is not NoneType)
        if len(inner) == 1:
            return _Kind("optional", items=inner)
    elif origin is Literal:
        literal: Any = type(arguments[0])
        return _kind(literal)
    elif origin is tuple:
        return _Kind("row", tuple, arguments[:1]) if arguments[-1] is Ellipsis else _Kind("tuple", items=arguments)
    elif origin in _SEQUENCES:
        return _Kind("row", _SEQUENCES[origin], arguments)
    elif origin in _MAPPINGS:
        return _Kind("mapping", _MAPPINGS[origin], arguments if origin is not Counter else (*arguments, int))
    elif np.ndarray in (origin, hint):
        return _Kind("array")
    elif is_dataclass(hint) or hasattr(hint, "_fields"):
        return _Kind("record", hint)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        return _Kind("enum", hint)
    elif hint in (bool, int, float, str):
        return _Kind("scalar", hint)
    elif hint is bytes:
        return _Kind("bytes")
    raise TypeError(f"a value of type {hint} cannot be saved")


@cache
def _fields(record: Any) -> Mapping[str, Any]:
    """Types of the saved fields."""
    hints = get_type_hints(record)
    if not is_dataclass(record):
        return {name: hints[name] for name in record._fields}  # a named tuple
    return {f.name: hints[f.name] for f in fields(record) if f.init and f.metadata.get("saved", True)}


@cache
def _with_default(record: Any) -> frozenset[str]:
    """Names of the fields that may be missing."""
    if not is_dataclass(record):
        return frozenset(record._field_defaults)
    return frozenset(f.name for f in fields(record) if f.default is not MISSING or f.default_factory is not MISSING)


def _join(name: str, field: object) -> str:
    return f"{name}.{field}" if name else str(field)


def _description(array: NDArray[Any]) -> str:
    """Type and shape of an array, which JSON holds in its place."""
    return f"{array.dtype}{list(array.shape)}"


class _Writer:
    def __init__(self, max_numbers: int = 1) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self.max_numbers = max_numbers
        """Longest column of numbers that is in the JSON."""

    def column(self, name: str, hint: Any, values: Sequence[Any]) -> Json:  # noqa: C901, PLR0911  one case per kind
        if not values:
            return None
        kind, make, items = _kind(hint)
        match kind:
            case "record":
                return {
                    f: self.column(_join(name, f), h, [getattr(v, f) for v in values]) for f, h in _fields(make).items()
                }
            case "tuple":
                return [self.column(_join(name, i), item, [v[i] for v in values]) for i, item in enumerate(items)]
            case "optional":
                present = self.column(f"{name}[present]", bool, [value is not None for value in values])
                return {"present": present, "values": self.column(name, items[0], [v for v in values if v is not None])}
            case "row":
                rows = [sorted(value) for value in values] if make in (set, frozenset) else values
                flat = [entry for row in rows for entry in row]
                return {"lengths": self.lengths(name, values), "values": self.column(f"{name}[]", items[0], flat)}
            case "mapping":
                keys = self.column(f"{name}[keys]", items[0], [key for value in values for key in value])
                column = self.column(f"{name}[]", items[1], [entry for value in values for entry in value.values()])
                return {"lengths": self.lengths(name, values), "keys": keys, "values": column}
            case "array":
                return self.stack(name, values)
            case "bytes":
                return self.stack(name, [np.frombuffer(value, np.uint8) for value in values])
            case "enum":
                return [value.value for value in values]
        scalars: list[Any] = [index(value) if make is int else make(value) for value in values]
        if make is not str and len(scalars) > self.max_numbers:
            return self.array(name, np.array(scalars, dtype=_DTYPES[make]))
        if make is float:  # JSON has no infinity
            return [value if math.isfinite(value) else value.hex() for value in scalars]
        return scalars

    def array(self, name: str, array: NDArray[Any]) -> str:
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{name}: an array of {array.dtype} cannot be saved")
        assert name not in self.arrays, f"two arrays are named {name}"
        self.arrays[name] = np.asarray(array, order="C")
        return _description(array)

    def lengths(self, name: str, values: Sequence[Any]) -> Json:
        return self.column(f"{name}[lengths]", int, list(map(len, values)))

    def stack(self, name: str, arrays: Sequence[NDArray[Any]]) -> Json:
        if len({(array.dtype, array.shape) for array in arrays}) == 1:
            return self.array(name, np.stack(arrays) if len(arrays) > 1 else arrays[0][np.newaxis])
        if all(array.ndim for array in arrays) and len({(array.dtype, array.shape[1:]) for array in arrays}) == 1:
            return {"lengths": self.lengths(name, arrays), "values": self.array(name, np.concatenate(arrays))}
        return [self.array(_join(name, i), array) for i, array in enumerate(arrays)]


class _Reader:
    """The inverse of `_Writer`, method by method."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.read: set[str] = set()
        """Names of the arrays that were read."""
        self.at = ""
        """The field that is being read."""

    def column(self, name: str, hint: Any, node: Json, rows: int) -> list[Any]:  # noqa: C901, PLR0911  one case per kind
        self.at = name
        if not rows:
            return []
        kind, make, items = _kind(hint)
        match kind:
            case "record":
                columns = self.columns(name, make, node, rows)
                self.at = name
                return [make(**{f: column[row] for f, column in columns.items()}) for row in range(rows)]
            case "tuple":
                nodes = self.sequence(name, node, len(items))
                members = [self.column(_join(name, i), item, nodes[i], rows) for i, item in enumerate(items)]
                return list(zip(*members, strict=True))
            case "optional":
                present = self.column(f"{name}[present]", bool, node["present"], rows)
                values = iter(self.column(name, items[0], node["values"], sum(present)))
                return [next(values) if is_present else None for is_present in present]
            case "row":
                lengths = self.lengths(name, node, rows)
                values = iter(self.column(f"{name}[]", items[0], node["values"], sum(lengths)))
                return [make(islice(values, length)) for length in lengths]
            case "mapping":
                lengths = self.lengths(name, node, rows)
                keys = self.column(f"{name}[keys]", items[0], node["keys"], sum(lengths))
                entries = zip(keys, self.column(f"{name}[]", items[1], node["values"], sum(lengths)), strict=True)
                return [make(dict(islice(entries, length))) for length in lengths]
            case "array":
                return self.unstack(name, node, rows)
            case "bytes":
                return [array.tobytes() for array in self.unstack(name, node, rows)]
            case "enum":
                return [make(entry) for entry in self.sequence(name, node, rows)]
        if make is not str and isinstance(node, str):
            array = self.entries(name, node, rows)
            self.expect(name, array.dtype == _DTYPES[make], str(np.dtype(_DTYPES[make])), node)
            return list(array.tolist())
        scalars = self.sequence(name, node, rows)
        if make is float:
            scalars = [float.fromhex(scalar) if isinstance(scalar, str) else scalar for scalar in scalars]
        for scalar in scalars:
            self.expect(name, type(scalar) is make, make.__name__, scalar)
        return scalars

    def expect(self, name: str, holds: bool, expected: str, found: Json) -> None:
        if not holds:
            raise CodecError(f"{name or 'the whole'}: expected {expected}, found {found!r:.80}")

    def sequence(self, name: str, node: Json, length: int) -> list[Any]:
        self.expect(name, isinstance(node, list) and len(node) == length, f"{length} values", node)
        return list(node)

    def columns(self, name: str, record: Any, node: Json, rows: int) -> dict[str, list[Any]]:
        """The columns of the saved fields of a record, all of which it has."""
        hints = _fields(record)
        self.expect(name, isinstance(node, dict), record.__name__, node)
        if unknown := sorted(node.keys() - hints.keys()):
            raise CodecError(f"{_join(name, unknown[0])}: unknown field of {record.__name__}")
        if missing := sorted(hints.keys() - node.keys() - _with_default(record)):
            raise CodecError(f"{_join(name, missing[0])}: missing, and has no default")
        return {field: self.column(_join(name, field), hints[field], node[field], rows) for field in node}

    def array(self, name: str, node: Json) -> NDArray[Any]:
        array = self.arrays.get(name)
        found = "none" if array is None else _description(array)
        self.expect(name, array is not None and found == node, f"array {node}", found)
        self.read.add(name)
        return np.array(array)

    def entries(self, name: str, node: Json, rows: int) -> NDArray[Any]:
        array = self.array(name, node)
        self.expect(name, array.shape[:1] == (rows,), f"{rows} entries", node)
        return array

    def lengths(self, name: str, node: Json, rows: int) -> list[int]:
        lengths = self.column(f"{name}[lengths]", int, node["lengths"], rows)
        self.expect(name, min(lengths) >= 0, "lengths", lengths)
        return lengths

    def unstack(self, name: str, node: Json, rows: int) -> list[NDArray[Any]]:
        if isinstance(node, str):
            return [np.array(entry) for entry in self.entries(name, node, rows)]
        if isinstance(node, dict):
            lengths = self.lengths(name, node, rows)
            joined = self.entries(name, node["values"], sum(lengths))
            return [np.array(entry) for entry in np.split(joined, np.cumsum(lengths)[:-1])]
        return [self.array(_join(name, i), entry) for i, entry in enumerate(self.sequence(name, node, rows))]
