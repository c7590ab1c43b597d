"""Variants of one test, most of which run with `make test-long` alone."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def variants(values: Mapping[str, Any] | Iterable[Any], short: Collection[str]) -> list[Any]:
    """Return a parameter for each value, named by its key or its text; those that `short` does not name are `long`.

    Raises:
        ValueError: `short` names a variant that there is not.
    """
    named = dict(values) if isinstance(values, Mapping) else {str(value): value for value in values}
    if missing := set(short) - set(named):
        raise ValueError(f"expected some of {', '.join(named)}; found {', '.join(sorted(missing))}")
    return [
        pytest.param(value, id=name, marks=() if name in short else pytest.mark.long) for name, value in named.items()
    ]
