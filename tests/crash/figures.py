"""What the commands of this folder tell: one JSON object each on standard output."""

import sys
from collections.abc import Sequence
from typing import Any

import orjson


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of 100 stay within; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def tell(figures: dict[str, Any]) -> None:
    """On standard output."""
    sys.stdout.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
