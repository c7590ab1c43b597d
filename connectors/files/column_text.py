"""A column's name, or a template that joins several columns, as text."""

import string
from collections.abc import Mapping
from typing import Any

import orjson

from streamlearn.errors import UsageError


class ColumnText:
    """What one field of a record is made of.

    >>> ColumnText("{question} ({topic})").of({"question": "Why?", "topic": "sky"})
    'Why? (sky)'
    """

    def __init__(self, option: str, expression: str) -> None:
        """Read an expression: the name of a column, or text with names in braces (`{{` is a brace).

        Raises:
            UsageError: it is empty, or a brace is not closed or holds more than a name.
        """
        self._parts: list[tuple[str, str | None]] = [("", expression)]
        if "{" in expression or "}" in expression:
            self._parts = list(_parsed(option, expression))
        self.columns = tuple(name for _, name in self._parts if name is not None)
        if not all(self.columns) or not self.columns:
            raise UsageError(f"{option}: expected a column, or text with columns in braces, found {expression!r}")

    @property
    def is_column(self) -> bool:
        """Whether it is one column as it stands."""
        return len(self._parts) == 1 and not self._parts[0][0]

    def of(self, values: Mapping[str, Any]) -> str:
        """Return the text for a row.

        Raises:
            TypeError: a value is neither text nor a number; the message names its column.
        """
        return "".join(text + ("" if name is None else as_text(name, values[name])) for text, name in self._parts)


def as_text(column: str, value: object) -> str:
    """Return text as it stands, and numbers and booleans as JSON writes them.

    Raises:
        TypeError: anything else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return orjson.dumps(value).decode()
    raise TypeError(
        f"column {column!r} must be text or a number, found {'null' if value is None else type(value).__name__}"
    )


def _parsed(option: str, expression: str) -> list[tuple[str, str | None]]:
    try:
        parts = list(string.Formatter().parse(expression))
    except ValueError as error:
        raise UsageError(f"{option}: {error} in {expression!r}; write {{{{ for a brace") from error
    if any(form or conversion for _, _, form, conversion in parts):
        raise UsageError(f"{option}: expected only names in braces, found {expression!r}")
    return [(text, name) for text, name, _, _ in parts]
