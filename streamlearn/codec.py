"""The codec of saved state: a tree of dataclasses becomes named arrays and JSON, and back, by type hints.

    arrays, json = dump(state)
    state = load(State, arrays, json)

Supported are dataclasses, named tuples, tuples, lists, sets, dicts, enums, NumPy arrays, bytes, str, int, float, bool
and `X | None`. A single value is a JSON node; its arrays have the dotted names of their fields. Values in a list or a
dict that hold records or arrays are stored as columns, one array per field, so the number of arrays does not grow with
the number of values:

    regimes: list[Regime]        regimes.visits                          int64[N]     one entry per regime
      visits: int                regimes.counts                          float32[N, B]
      counts: NDArray            regimes.sample, regimes.sample[lengths]  arrays of different lengths, joined
      sample: NDArray            regimes.name[present], regimes.name     optional values: only those present
      name: int | None

A field that was not saved takes its default; one that the type does not have is an error. Fields with `init=False` or
`metadata=NOT_SAVED` are left out. Floats keep every bit, apart from the payload of a NaN outside of arrays.
"""

import json
from collections import Counter, abc, deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
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
    tree = writer.value("", type(value) if hint is None else hint, value)
    return writer.arrays, tree


def load(hint: type[T], arrays: Arrays, tree: Json) -> T:
    """The inverse of `dump`; the value shares no memory with `arrays`.

    Raises:
        CodecError: a field is unknown, missing without a default, or damaged.
    """
    reader = _Reader(arrays)
    try:
        value: T = reader.value("", hint, tree)
    except CodecError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise CodecError(f"{reader.at or 'the whole'}: {error}") from error
    if unknown := sorted(arrays.keys() - reader.read):
        raise CodecError(f"{unknown[0]}: unknown array")
    return value


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
def _is_columnar(hint: Any) -> bool:
    """Whether several such values are stored as columns: they hold records or arrays."""
    kind = _kind(hint)
    return kind.name in ("record", "array", "bytes") or any(map(_is_columnar, kind.items))


@cache
def _is_object(hint: Any) -> bool:
    """Whether a dict is a JSON object: its keys are text or numbers, and its values are no records."""
    key, value = _kind(hint).items
    return key in (str, int) and (not _is_columnar(value) or _kind(value).name == "array")


def _join(name: str, field: object) -> str:
    return f"{name}.{field}" if name else str(field)


def _inner(name: str, hint: Any) -> str:
    """Name of the values in a column of lists; values that have lengths too need a name of their own."""
    return f"{name}[values]" if _kind(hint).name in ("optional", "array", "bytes", "row", "mapping") else name


def _scalar(make: Any, value: Any) -> Any:
    return index(value) if make is int else make(value)


def _description(array: NDArray[Any]) -> str:
    """Type and shape of an array, which JSON holds in its place."""
    return f"{array.dtype}{list(array.shape)}"


class _Writer:
    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}

    def value(self, name: str, hint: Any, value: Any) -> Json:  # noqa: C901, PLR0911  one case per kind of type
        kind, make, items = _kind(hint)
        match kind:
            case "optional":
                return None if value is None else self.value(name, items[0], value)
            case "record":
                return {f: self.value(_join(name, f), h, getattr(value, f)) for f, h in _fields(make).items()}
            case "array":
                return self.array(name, value)
            case "bytes":
                return self.array(name, np.frombuffer(value, np.uint8).copy())
            case "tuple":
                return [self.value(_join(name, i), item, value[i]) for i, item in enumerate(items)]
            case "row":
                values = sorted(value) if make in (set, frozenset) else list(value)
                if _is_columnar(items[0]):
                    return {"rows": len(values), "columns": self.column(name, items[0], values)}
                return [self.value(name, items[0], entry) for entry in values]
            case "mapping" if _is_object(hint):
                return {str(key): self.value(_join(name, key), items[1], entry) for key, entry in value.items()}
            case "mapping":
                keys = self.column(f"{name}[keys]", items[0], list(value))
                return {"rows": len(value), "keys": keys, "columns": self.column(name, items[1], list(value.values()))}
            case "enum":
                return value.value
        scalar = _scalar(make, value)
        return scalar.hex() if make is float and not np.isfinite(scalar) else scalar  # JSON has no infinity

    def column(self, name: str, hint: Any, values: Sequence[Any]) -> Json:  # noqa: PLR0911  one case per kind of type
        if not values:
            return None
        kind, make, items = _kind(hint)
        match kind:
            case "optional":
                present = [value is not None for value in values]
                column = self.column(name, items[0], [value for value in values if value is not None])
                return {"present": self.array(f"{name}[present]", np.array(present)), "values": column}
            case "record":
                return {
                    f: self.column(_join(name, f), h, [getattr(value, f) for value in values])
                    for f, h in _fields(make).items()
                }
            case "array":
                return self.stack(name, values)
            case "bytes":
                return self.stack(name, [np.frombuffer(value, np.uint8).copy() for value in values])
            case "tuple":
                return [self.column(_join(name, i), item, [v[i] for v in values]) for i, item in enumerate(items)]
            case "row":
                flat = [e for value in values for e in (sorted(value) if make in (set, frozenset) else value)]
                return {
                    "lengths": self.lengths(name, values),
                    "values": self.column(_inner(name, items[0]), items[0], flat),
                }
            case "mapping":
                keys = self.column(f"{name}[keys]", items[0], [key for value in values for key in value])
                column = self.column(_inner(name, items[1]), items[1], [e for value in values for e in value.values()])
                return {"lengths": self.lengths(name, values), "keys": keys, "values": column}
            case "scalar" if make is not str:
                return self.array(name, np.array([_scalar(make, value) for value in values], dtype=_DTYPES[make]))
        return [self.value(name, hint, value) for value in values]

    def array(self, name: str, array: NDArray[Any]) -> str:
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{name}: an array of {array.dtype} cannot be saved")
        assert name not in self.arrays, f"two arrays are named {name}"
        self.arrays[name] = np.asarray(array, order="C")
        return _description(array)

    def lengths(self, name: str, values: Sequence[Any]) -> str:
        return self.array(f"{name}[lengths]", np.array(list(map(len, values)), dtype=np.int64))

    def stack(self, name: str, arrays: Sequence[NDArray[Any]]) -> Json:
        if len({(array.dtype, array.shape) for array in arrays}) == 1:
            return self.array(name, np.stack(arrays))
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

    def value(self, name: str, hint: Any, node: Json) -> Any:  # noqa: C901, PLR0911  one case per kind of type
        self.at = name
        kind, make, items = _kind(hint)
        match kind:
            case "optional":
                return None if node is None else self.value(name, items[0], node)
            case "record":
                hints = self.known(name, make, node)
                return self.make(name, make, {f: self.value(_join(name, f), hints[f], node[f]) for f in node})
            case "array":
                return self.array(name, node)
            case "bytes":
                return self.array(name, node).tobytes()
            case "tuple":
                self.expect(name, isinstance(node, list) and len(node) == len(items), f"{len(items)} values", node)
                return tuple(self.value(_join(name, i), item, node[i]) for i, item in enumerate(items))
            case "row":
                if _is_columnar(items[0]):
                    return make(self.column(name, items[0], node["columns"], self.rows(name, node)))
                self.expect(name, isinstance(node, list), "a list", node)
                return make([self.value(name, items[0], entry) for entry in node])
            case "mapping" if _is_object(hint):
                return make({items[0](key): self.value(_join(name, key), items[1], node[key]) for key in node})
            case "mapping":
                rows = self.rows(name, node)
                keys = self.column(f"{name}[keys]", items[0], node["keys"], rows)
                return make(dict(zip(keys, self.column(name, items[1], node["columns"], rows), strict=True)))
            case "enum":
                return make(node)
        if make is float and isinstance(node, str):
            return float.fromhex(node)
        self.expect(name, type(node) is make or (make is float and type(node) is int), make.__name__, node)
        return make(node)

    def column(self, name: str, hint: Any, node: Json, rows: int) -> list[Any]:  # noqa: PLR0911  one case per kind of type
        self.at = name
        if not rows:
            return []
        kind, make, items = _kind(hint)
        match kind:
            case "optional":
                present = self.entries(f"{name}[present]", node["present"], rows).tolist()
                values = iter(self.column(name, items[0], node["values"], sum(present)))
                return [next(values) if is_present else None for is_present in present]
            case "record":
                hints = self.known(name, make, node)
                columns = {f: self.column(_join(name, f), hints[f], node[f], rows) for f in node}
                return [self.make(name, make, {f: columns[f][row] for f in columns}) for row in range(rows)]
            case "array":
                return self.unstack(name, node, rows)
            case "bytes":
                return [array.tobytes() for array in self.unstack(name, node, rows)]
            case "tuple":
                members = [self.column(_join(name, i), item, node[i], rows) for i, item in enumerate(items)]
                return list(zip(*members, strict=True))
            case "row":
                lengths = self.lengths(name, node, rows)
                values = iter(self.column(_inner(name, items[0]), items[0], node["values"], sum(lengths)))
                return [make([next(values) for _ in range(length)]) for length in lengths]
            case "mapping":
                lengths = self.lengths(name, node, rows)
                keys = iter(self.column(f"{name}[keys]", items[0], node["keys"], sum(lengths)))
                values = iter(self.column(_inner(name, items[1]), items[1], node["values"], sum(lengths)))
                return [make({next(keys): next(values) for _ in range(length)}) for length in lengths]
            case "scalar" if make is not str:
                array = self.entries(name, node, rows)
                self.expect(name, array.dtype == _DTYPES[make], str(np.dtype(_DTYPES[make])), node)
                return list(array.tolist())
        self.expect(name, isinstance(node, list) and len(node) == rows, f"{rows} values", node)
        return [self.value(name, hint, entry) for entry in node]

    def expect(self, name: str, holds: bool, expected: str, found: Json) -> None:
        if not holds:
            raise CodecError(f"{name or 'the whole'}: expected {expected}, found {found!r:.80}")

    def known(self, name: str, record: Any, node: Json) -> Mapping[str, Any]:
        """Types of a record's fields; `node` has no others, and all that have no default."""
        hints = _fields(record)
        self.expect(name, isinstance(node, dict), record.__name__, node)
        if unknown := sorted(node.keys() - hints.keys()):
            raise CodecError(f"{_join(name, unknown[0])}: unknown field of {record.__name__}")
        if missing := sorted(hints.keys() - node.keys() - _optional(record)):
            raise CodecError(f"{_join(name, missing[0])}: missing, and has no default")
        return hints

    def make(self, name: str, record: Any, values: Mapping[str, Any]) -> Any:
        self.at = name
        return record(**values)

    def rows(self, name: str, node: Json) -> int:
        rows = node["rows"]
        self.expect(name, type(rows) is int and rows >= 0, "a number of rows", rows)
        return int(rows)

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
        array = self.entries(f"{name}[lengths]", node["lengths"], rows)
        self.expect(name, array.dtype == np.int64 and bool((array >= 0).all()), "lengths", array.tolist())
        return list(array.tolist())

    def unstack(self, name: str, node: Json, rows: int) -> list[NDArray[Any]]:
        if isinstance(node, str):
            return [np.array(entry) for entry in self.entries(name, node, rows)]
        if isinstance(node, dict):
            lengths = self.lengths(name, node, rows)
            joined = self.entries(name, node["values"], sum(lengths))
            return [np.array(entry) for entry in np.split(joined, np.cumsum(lengths)[:-1])]
        self.expect(name, isinstance(node, list) and len(node) == rows, f"{rows} arrays", node)
        return [self.array(_join(name, i), entry) for i, entry in enumerate(node)]


@cache
def _optional(record: Any) -> frozenset[str]:
    """Names of the fields with a default."""
    if not is_dataclass(record):
        return frozenset(record._field_defaults)
    return frozenset(f.name for f in fields(record) if f.default is not MISSING or f.default_factory is not MISSING)
