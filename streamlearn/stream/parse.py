"""Parsing of a record's bytes to a JSON object and its fields: bounded and strict; the only error is a RecordError.

The standard library parses in one pass. Its hooks refuse what it would accept: duplicate keys, NaN and infinities, and
integers beyond 64 bits. Then the tree is walked once: depth, sizes of lists and strings, lone surrogates.
"""

import json
import math
from collections import Counter
from typing import Any, NoReturn

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings

_INTEGERS = range(-(1 << 63), 1 << 64)
_PLAIN = frozenset({int, float, bool, type(None)})


def parse(value: bytes | None, limits: StreamSettings) -> dict[str, Any]:
    """Parse the JSON object in `value`.

    Raises:
        RecordError: the value is absent, too large, not UTF-8, not strict JSON, too deeply nested, or not an object.
    """
    if value is None or not value.strip():
        raise RecordError(Reason.EMPTY, "a record must be a JSON object, found no value")
    if len(value) > limits.max_record_bytes:
        raise too_large(value, limits)
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise RecordError(Reason.NOT_UTF8, f"a record must be UTF-8: {error.reason} at byte {error.start}") from None
    tree = _parse(text, "a record")
    if not isinstance(tree, dict):
        raise RecordError(Reason.BAD_FORM, f"a record must be a JSON object, found {json_type(tree)}")
    check_tree(tree, limits)
    return tree


def too_large(value: bytes, limits: StreamSettings) -> RecordError:
    """The error of a value of more than `max_record_bytes`."""
    return RecordError(
        Reason.TOO_LARGE,
        f"a record may have at most {limits.max_record_bytes} bytes (max_record_bytes), found {len(value)}",
    )


def parse_text(text: str, where: str, limits: StreamSettings) -> Any:
    """Parse the JSON in a string of a record, as strictly as the record itself.

    Raises:
        RecordError: it is not strict JSON, or too deeply nested.
    """
    tree = _parse(text, where)
    if isinstance(tree, dict | list):
        check_tree(tree, limits)
    return tree


def _parse(text: str, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise RecordError(Reason.TOO_DEEP, f"{where} is nested too deeply to be parsed") from None
    except ValueError as error:
        raise RecordError(Reason.NOT_JSON, f"{where} must be JSON: {error}") from None


def json_type(value: object) -> str:
    """Return JSON's name for the type of `value`, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def read_string(value: object, where: str, limits: StreamSettings) -> str:
    """Return `value` if it is a string that a tokenizer accepts. Objects in requests arrive here without `parse`."""
    if not isinstance(value, str):
        raise RecordError(Reason.BAD_TYPE, f"{where} must be a string, found {json_type(value)}")
    _check_string(value, where, limits)
    return value


def read_list(value: object, where: str, limits: StreamSettings) -> list[Any]:
    """Return `value` if it is a list of at most `max_items`."""
    if not isinstance(value, list):
        raise RecordError(Reason.BAD_TYPE, f"{where} must be a list, found {json_type(value)}")
    _check_size(value, where, limits)
    return value


def read_integers(value: object, where: str, limits: StreamSettings) -> list[int]:
    """Return a copy of `value` if it is a list of integers; booleans and 1.0 are not integers."""
    items = read_list(value, where, limits)
    if not set(map(type, items)) <= {int}:
        at, item = next((i, item) for i, item in enumerate(items) if type(item) is not int)
        kind = "a fraction" if isinstance(item, float) else json_type(item)
        raise RecordError(Reason.BAD_TYPE, f"{where} must hold only integers, found {kind} at index {at}")
    return list(items)


def check_tree(tree: dict[str, Any] | list[Any], limits: StreamSettings) -> None:
    """Check depth and sizes level by level, without recursion: deep nesting cannot exhaust Python's stack."""
    level = [tree]
    depth = 0
    while level:
        depth += 1
        if depth > limits.max_depth:
            raise RecordError(
                Reason.TOO_DEEP,
                f"a record may be nested at most {limits.max_depth} levels deep (max_depth), found more",
            )
        deeper = []
        for container in level:
            _check_size(container, "a list or object", limits)
            items: Any = container
            if isinstance(container, dict):
                for key in container:
                    _check_string(key, "a string", limits)
                items = container.values()
            if set(map(type, items)) <= _PLAIN:  # a list of a thousand token ids takes one pass in C
                continue
            for item in items:
                if isinstance(item, str):
                    _check_string(item, "a string", limits)
                elif isinstance(item, dict | list):
                    deeper.append(item)
        level = deeper


def _check_size(container: dict[str, Any] | list[Any], where: str, limits: StreamSettings) -> None:
    if len(container) > limits.max_items:
        raise RecordError(
            Reason.TOO_LARGE, f"{where} may hold at most {limits.max_items} items (max_items), found {len(container)}"
        )


def _check_string(text: str, where: str, limits: StreamSettings) -> None:
    if len(text) > limits.max_string_chars:
        raise RecordError(
            Reason.TOO_LARGE,
            f"{where} may have at most {limits.max_string_chars} characters (max_string_chars), found {len(text)}",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            Reason.NOT_UTF8, f"{where} must be valid Unicode, found a lone surrogate at character {error.start}"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise RecordError(Reason.DUPLICATE_KEY, f"the keys of an object must be unique, found {twice[:80]!r} twice")
    return values


def _bounded(digits: str) -> int:
    integer = int(digits) if len(digits) <= len(str(_INTEGERS.start)) else _INTEGERS.stop
    if integer not in _INTEGERS:
        raise RecordError(Reason.NOT_FINITE, f"an integer must fit 64 bits, found {len(digits.lstrip('-'))} digits")
    return integer


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise RecordError(Reason.NOT_FINITE, f"numbers must be finite, found {digits[:80]}")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError(Reason.NOT_FINITE, f"numbers must be finite, found {name}")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_bounded, parse_float=_finite, parse_constant=_refuse_constant
)
