"""The codec of saved state."""

import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from streamlearn.codec import NOT_SAVED, CodecError, dump, dump_json, load


class Color(StrEnum):
    """Text."""

    RED = "red"
    BLUE = "blue"


class Level(Enum):
    """A number."""

    LOW = 1
    HIGH = 2


class Sample(NamedTuple):
    """Arrays of different lengths."""

    tokens: NDArray[np.uint16]
    length: float
    ordinal: int = 0


@dataclass(frozen=True, eq=False)
class Window:
    """Arrays of one shape, and records in a row."""

    phi: NDArray[np.float32]
    samples: tuple[Sample, ...] = ()
    color: Color = Color.RED
    parent: int | None = None


@dataclass(frozen=True)
class Origin:
    """A key."""

    topic: str
    partition: int


@dataclass(frozen=True)
class History:
    """No arrays."""

    losses: list[tuple[Origin, float]]


@dataclass(eq=False)
class State:
    """One field per kind of type."""

    window: Window
    regimes: dict[int, Window] = field(default_factory=dict)
    slots: tuple[Window | None, ...] = ()
    undecided: tuple[tuple[int, ...], ...] = ()
    recent: list[float] = field(default_factory=list)
    loss: float | None = None
    name: str = ""
    levels: list[Level] = field(default_factory=list)
    kind: Literal["inputs", "answers"] = "inputs"
    is_frozen: bool = False
    pair: tuple[int, str] = (0, "")
    images: list[bytes] = field(default_factory=list)
    load: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    position: dict[Origin, int] = field(default_factory=dict)
    history: list[tuple[Origin, float]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    numbers: frozenset[int] = frozenset()
    queue: deque[int] = field(default_factory=deque)
    by_name: dict[str, list[Window]] = field(default_factory=dict)
    cached: int = field(default=7, metadata=NOT_SAVED)
    derived: int = field(init=False, default=0)


def flat(value: Any) -> Any:
    """Nested values that compare bit for bit."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if isinstance(value, dict):
        return [(flat(key), flat(entry)) for key, entry in value.items()]
    if isinstance(value, tuple | list | deque):
        return [type(value), *map(flat, value)]
    if hasattr(value, "__dataclass_fields__"):
        return [type(value), *[flat(getattr(value, name)) for name in value.__dataclass_fields__]]
    return type(value), value


def round_trip(value: Any, hint: Any = None) -> Any:
    saved, json = dump(value, hint)
    return load(type(value) if hint is None else hint, saved, orjson.loads(orjson.dumps(json)))


ints = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(width=64)
samples = st.builds(Sample, arrays(np.uint16, st.integers(0, 4)), floats, ints)
windows = st.builds(
    Window,
    arrays(np.float32, array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)),
    st.lists(samples, max_size=3).map(tuple),
    st.sampled_from(Color),
    st.none() | ints,
)
origins = st.builds(Origin, st.text(max_size=3), ints)
states = st.builds(
    State,
    windows,
    regimes=st.dictionaries(ints, windows, max_size=3),
    slots=st.lists(st.none() | windows, max_size=4).map(tuple),
    undecided=st.lists(st.lists(ints, max_size=2).map(tuple), max_size=3).map(tuple),
    recent=st.lists(floats, max_size=4),
    loss=st.none() | floats,
    name=st.text(max_size=4),
    levels=st.lists(st.sampled_from(Level), max_size=3),
    kind=st.sampled_from(["inputs", "answers"]),
    is_frozen=st.booleans(),
    pair=st.tuples(ints, st.text(max_size=2)),
    images=st.lists(st.binary(max_size=4), max_size=3),
    load=st.dictionaries(st.text(st.characters(categories=["L"]), min_size=1), arrays(np.float32, (2, 3)), max_size=2),
    position=st.dictionaries(origins, ints, max_size=2),
    history=st.lists(st.tuples(origins, floats), max_size=2),
    reasons=st.dictionaries(st.text(max_size=2), ints, max_size=2).map(Counter),
    numbers=st.frozensets(ints, max_size=3),
    queue=st.lists(ints, max_size=3).map(deque),
    by_name=st.dictionaries(st.text(max_size=2), st.lists(windows, max_size=2), max_size=2),
)


@settings(deadline=None)
@given(states)
def test_a_tree_survives_a_round_trip_bit_for_bit(state: State) -> None:
    assert flat(round_trip(state)) == flat(state)


@settings(deadline=None)
@given(st.lists(windows, max_size=4))
def test_the_root_may_be_a_container(rows: list[Window]) -> None:
    assert flat(round_trip(rows, list[Window])) == flat(rows)


def some_state(**changes: Any) -> State:
    samples = tuple(Sample(np.arange(i, dtype=np.uint16), i / 3, i) for i in range(3))
    window = Window(np.ones((2, 3), np.float32), samples)
    return State(window, regimes={4: window, 9: window}, **changes)


def test_records_in_a_row_are_stored_as_columns_with_readable_names() -> None:
    saved, json = dump(some_state())
    assert set(saved) == {
        *("window.phi", "window.samples[].tokens", "window.samples[].tokens[lengths]"),
        *("window.samples[].length", "window.samples[].ordinal"),
        *("regimes[keys]", "regimes[].phi", "regimes[].samples[lengths]", "regimes[].samples[].tokens"),
        *("regimes[].samples[].tokens[lengths]", "regimes[].samples[].length", "regimes[].samples[].ordinal"),
        "regimes[].parent[present]",
    }
    assert saved["regimes[].phi"].shape == (2, 2, 3)
    assert json["regimes"]["values"]["phi"] == "float32[2, 2, 3]"


def test_the_number_of_arrays_does_not_grow_with_the_number_of_records() -> None:
    window = Window(np.zeros(3, np.float32), (Sample(np.arange(2, dtype=np.uint16), 0.5),))
    few, many = (dump(dict.fromkeys(range(n), window), dict[int, Window]) for n in (2, 256))
    assert few[0].keys() == many[0].keys()
    assert len(orjson.dumps(many[1]["values"]["phi"])) < 100


def test_a_field_that_was_not_saved_takes_its_default() -> None:
    """Also in columns: a release that adds a field reads the snapshots of the one before."""
    saved, json = dump(some_state(name="x", loss=2.5))
    del json["loss"], json["name"], json["regimes"]["values"]["color"]
    state = load(State, saved, json)
    assert state.loss is None
    assert state.name == ""
    assert state.regimes[4].color is Color.RED


def test_fields_that_are_not_saved_take_their_defaults() -> None:
    state = some_state(cached=8)
    state.derived = 3
    loaded = round_trip(state)
    assert (loaded.cached, loaded.derived) == (7, 0)


def test_a_value_without_arrays_can_be_saved_as_json() -> None:
    history = History([(Origin("a", 1), math.inf), (Origin("b", 2), 0.1)])
    assert load(History, {}, orjson.loads(orjson.dumps(dump_json(history)))) == history


def test_a_loaded_value_shares_no_memory_with_the_arrays() -> None:
    saved, json = dump(some_state())
    state = load(State, saved, json)
    state.regimes[4].phi[:] = 5
    assert state.regimes[9].phi.max() == 1
    assert saved["regimes[].phi"].max() == 1


GONE = object()
DAMAGE: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "unknown field": (("window", "colour"), "red", r"^window\.colour: unknown field of Window"),
    "no required field": (("window",), GONE, r"^window: missing, and has no default"),
    "unknown column": (("regimes", "values", "size"), "int64[2]", r"^regimes\[\]\.size: unknown field of Window"),
    "other type": (("is_frozen",), [1], r"^is_frozen: expected bool, found 1"),
    "unknown enum": (("window", "color"), ["green"], r"^window\.color: 'green' is not a valid Color"),
    "no lengths": (("regimes", "lengths"), GONE, r"^regimes: 'lengths'"),
}
"""Where the JSON is changed, to what, and the message."""
ARRAY_DAMAGE: dict[str, tuple[Any, str]] = {
    "window.phi": (GONE, r"^window\.phi: expected array float32\[1, 2, 3\], found 'none'"),
    "regimes[].phi": (
        np.ones((1, 2, 3), np.float32),
        r"^regimes\[\]\.phi: expected array float32\[2, 2, 3\], found 'float32\[1, 2, 3\]'",
    ),
    "window.samples[].tokens[lengths]": (
        np.array([0, 4, -1]),
        r"^window\.samples\[\]\.tokens: expected lengths, found \[0, 4, -1\]",
    ),
    "window.psi": (np.zeros(1), r"^window\.psi: unknown array"),
}


def change(node: Any, *path: str, value: Any) -> None:
    for key in path[:-1]:
        node = node[key]
    if value is GONE:
        del node[path[-1]]
    else:
        node[path[-1]] = value


def test_damage_is_an_error_that_names_the_field() -> None:
    for path, value, message in DAMAGE.values():
        saved, json = dump(some_state())
        change(json, *path, value=value)
        with pytest.raises(CodecError, match=message):
            load(State, saved, json)
    for name, (value, message) in ARRAY_DAMAGE.items():
        saved, json = dump(some_state())
        change(saved, name, value=value)
        with pytest.raises(CodecError, match=message):
            load(State, saved, json)


def test_a_column_that_is_too_short_is_an_error() -> None:
    saved, json = dump(some_state())
    saved["window.samples[].length"] = saved["window.samples[].length"][:1]
    json["window"]["samples"]["values"]["length"] = "float64[1]"
    with pytest.raises(CodecError, match=r"^window\.samples\[\]\.length: expected 3 entries, found 'float64\[1\]'"):
        load(State, saved, json)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.data())
def test_any_other_json_is_refused_as_damaged_or_read(data: st.DataObject) -> None:
    """Nothing but a CodecError comes out, wherever the JSON was changed."""
    saved, json = dump(some_state())
    node = json
    while isinstance(node, dict) and node:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or data.draw(st.booleans()):
            node[key] = data.draw(json_values)
            break
        node = node[key]
    with suppress(CodecError):
        load(State, saved, json)


def test_a_type_that_cannot_be_saved_is_a_mistake_in_the_program() -> None:
    with pytest.raises(TypeError, match="cannot be saved"):
        dump(1 + 2j)
    with pytest.raises(TypeError, match="an array of object cannot be saved"):
        dump(Window(np.array([None], dtype=object)))


@dataclass(frozen=True)
class Album:
    """Values with lengths, in a list of values with lengths."""

    images: tuple[bytes, ...]
    pages: tuple[tuple[int, ...], ...] = ()
    notes: tuple[bytes | None, ...] = ()
    titles: dict[int, bytes] = field(default_factory=dict)


def test_lists_of_lists_of_different_lengths() -> None:
    """The lengths of the inner and of the outer lists are two arrays."""
    albums = (
        Album((b"a", b"bcd"), ((1,), (), (2, 3)), (None, b"x"), {1: b"one", 2: b"seven"}),
        Album(()),
        Album((b"ef",), ((4, 5),), (b"yz",)),
    )
    assert load(tuple[Album, ...], *dump(albums, tuple[Album, ...])) == albums


def test_an_alias_is_the_type_behind_it() -> None:
    """NumPy's NDArray is an alias from 2.5 on: no snapshot could be written."""
    aliased: Any = TypeAliasType("aliased", np.ndarray)
    arrays, tree = dump(np.arange(3), aliased)
    np.testing.assert_array_equal(load(aliased, arrays, tree), np.arange(3))
