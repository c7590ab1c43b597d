"""Figures: one JSON object on standard output."""

import sys
from collections.abc import Sequence
from typing import Any

import orjson


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the given percentile of the values; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def print_figures(figures: dict[str, Any]) -> None:
    """Print figures as JSON."""
    sys.stdout.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
