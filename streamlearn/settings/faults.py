"""Wrong values in words: the key, what must hold, what was found, and the nearest known key."""

import difflib
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

from pydantic import BaseModel, ValidationError

from streamlearn.settings.section import section_type
from streamlearn.settings.values import Keys, section_at

_NUMBER, _WHOLE, _TRUTH = "expected a number", "expected a whole number", "expected true or false"
_MAPPING = "expected a mapping of keys to values"
_WORDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), _WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), _NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), _TRUTH),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"), _MAPPING),
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list such as [a, b]"),
    "string_type": "expected text",
    "path_type": "expected a path",
    "finite_number": "expected a finite number",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "literal_error": "expected {expected}",
    "enum": "expected {expected}",
    "missing": "expected more items",
    "too_short": "expected at least {min_length} items",
    "too_long": "expected at most {max_length} items",
    "string_too_short": "expected at least {min_length} characters",
    "string_too_long": "expected at most {max_length} characters",
    "string_pattern_mismatch": "expected text of the form {pattern}",
}
"""By pydantic's type of a fault; `{...}` is of its context."""


def in_words(fault: Mapping[str, Any]) -> str:
    """What must hold, of one of pydantic's errors."""
    given = {key: f"{value:g}" if isinstance(value, float) else value for key, value in fault.get("ctx", {}).items()}
    words = _WORDS.get(fault["type"])
    message: str = fault["msg"].removeprefix("Value error, ") if words is None else words.format(**given)
    return message.replace("at least 1 items", "at least one item")


def real_faults(error: Any) -> list[Any]:
    """The faults of one of pydantic's errors, without those that follow: a list of wrong items counts as empty."""
    errors = list(error.errors())
    return [fault for fault in errors if fault["type"] != "too_short"] or errors


def explain(error: ValidationError, model: type[BaseModel], *section: str) -> list[str]:
    """One line per fault of a configuration, or of a section of this name; see `faults`."""
    return [line for _, line in faults(error, model, *section)]


def faults(error: ValidationError, model: type[BaseModel], *section: str) -> Iterator[tuple[Keys, str]]:
    """Each fault of a model's values, which are the section of this name: its path, and one line.

    The line has the dotted key, what must hold, what was found, and the nearest known key.
    """
    for fault in real_faults(error):
        path = tuple(part for part in fault["loc"] if isinstance(part, str))
        key = ".".join((*section, *path)) or "configuration"
        if fault["type"] == "extra_forbidden":
            known = list(getattr(section_at(model, path[:-1]), "model_fields", {}))
            near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
            nearest = ".".join((*section, *path[:-1], *near))
            yield (
                path,
                f"{key}: unknown key, " + (f"did you mean {nearest}?" if near else f"known keys: {', '.join(known)}"),
            )
        elif fault["type"] == "missing" and isinstance(fault["loc"][-1], str):
            yield path, f"{key}: required, but missing"
        else:
            message = in_words(fault)
            yield (
                path,
                f"{key}: {message}{_found(fault['input'], message) if _may_be_shown(model, path) else ''}"
                + (": put it in quotes" if fault["type"] in _TEXTS and isinstance(fault["input"], _SCALARS) else ""),
            )


_TEXTS = ("string_type", "path_type")
_SCALARS = (bool, int, float, date)
"""What YAML makes of unquoted text: no, 0123, 1e5, 2026-01-01."""


def _found(value: Any, message: str) -> str:
    """A wrong value as YAML has it; empty where the message has it, or it is no plain value."""
    if "found" in message or not (value is None or isinstance(value, (str, *_SCALARS))):
        return ""
    if value is None or isinstance(value, bool):
        return f", found {'null' if value is None else str(value).lower()}"
    return f", found {value if isinstance(value, date) else repr(value)}"


def _may_be_shown(model: type[BaseModel], path: Keys) -> bool:
    """Whether a message may quote a wrong value: only one of a plain setting that is no secret."""
    field = getattr(section_at(model, path[:-1]), "model_fields", {}).get(path[-1]) if path else None
    return field is not None and section_type(field.annotation) is None and "password" not in path[-1]
