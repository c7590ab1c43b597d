"""Losses along the stream as characters: braille dots, eight to a cell, or plain ASCII."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions
from rich.text import Text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille cell's dots, by row and column (Unicode, block U+2800)."""
_BRAILLE = 0x2800
LOSS_STYLE, BACKBONE_STYLE = "cyan", "yellow"
BACKBONE_MARK = "o"
_LOSS_MARK = "*"
_AXIS = 8  # columns of the terminal left of the chart


@dataclass(frozen=True)
class ChartPoint:
    """A mean over the records from `first` to `last`."""

    first: int
    last: int
    value: float
    weight: float


def column_means(points: Sequence[ChartPoint], first: int, last: int, width: int) -> list[float | None]:
    """Mean of the points in each of `width` equal parts of the records from `first` to `last`; None without any.

    >>> points = [ChartPoint(1, 2, 4.0, 1.0), ChartPoint(3, 4, 2.0, 1.0)]
    >>> column_means(points, 1, 4, 2), column_means(points, 1, 4, 1), column_means(points, 1, 8, 2)
    ([4.0, 2.0], [3.0], [3.0, None])
    """
    sums, weights = [0.0] * width, [0.0] * width
    per_column = (last - first + 1) / width
    for point in points:
        begin = (point.first - first) / per_column
        end = max(begin, (point.last - first + 1) / per_column - 1e-9)
        for column in range(max(0, int(begin)), min(width - 1, int(end)) + 1):
            sums[column] += point.value * point.weight
            weights[column] += point.weight
    return [total / weight if weight else None for total, weight in zip(sums, weights, strict=True)]


@dataclass(frozen=True)
class LossChart:
    """Prequential loss as a line, and the untouched backbone's as marks, told apart without colours too."""

    loss: Sequence[ChartPoint]
    backbone: Sequence[ChartPoint]
    first: int
    """First record at the left edge."""
    last: int
    """Last record at the right edge."""
    height: int
    """Lines of the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(10, options.max_width - _AXIS)
        fine = 1 if options.ascii_only else 2
        loss = column_means(self.loss, self.first, self.last, width * fine)
        backbone = column_means(self.backbone, self.first, self.last, width)
        known = [value for value in (*loss, *backbone) if value is not None]
        low, high = _bounds(known)
        cells = _ascii(loss, low, high, self.height) if options.ascii_only else _braille(loss, low, high, self.height)
        marks = _rows_of(backbone, low, high, self.height)
        for row in range(self.height):
            line = Text(_label(row, self.height, low, high) if known else " " * _AXIS, style="dim")
            for column, mark in enumerate(marks):
                is_backbone = mark == row
                line.append(
                    BACKBONE_MARK if is_backbone else cells[row][column],
                    style=BACKBONE_STYLE if is_backbone else LOSS_STYLE,
                )
            yield line


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest value of the axis; never the same."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    return (low, high) if high - low > 1e-3 else (low - 0.5, high + 0.5)


def _row(value: float, low: float, high: float, height: int) -> int:
    """From the top, 0."""
    return min(height - 1, max(0, math.floor((high - value) / (high - low) * height)))


def _rows_of(values: Sequence[float | None], low: float, high: float, height: int) -> list[int | None]:
    return [None if value is None else _row(value, low, high, height) for value in values]


def _lines(values: Sequence[float | None], low: float, high: float, height: int) -> Iterator[tuple[int, int]]:
    """Column and row of every dot: each value, and what connects it with the one before."""
    rows = _rows_of(values, low, high, height)
    for column, (before, row) in enumerate(pairwise([None, *rows])):
        if row is not None:
            start = row if before is None else before + (row > before) - (row < before)
            for each in range(min(start, row), max(start, row) + 1):
                yield column, each


def _braille(values: Sequence[float | None], low: float, high: float, height: int) -> list[list[str]]:
    bits = [[0] * (len(values) // 2) for _ in range(height)]
    for column, row in _lines(values, low, high, height * 4):
        bits[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    return [[chr(_BRAILLE + each) if each else " " for each in row] for row in bits]


def _ascii(values: Sequence[float | None], low: float, high: float, height: int) -> list[list[str]]:
    cells = [[" "] * len(values) for _ in range(height)]
    for column, row in _lines(values, low, high, height):
        cells[row][column] = _LOSS_MARK
    return cells


def _label(row: int, height: int, low: float, high: float) -> str:
    """The axis: the highest value at the top, the lowest at the bottom."""
    value = {0: high, height - 1: low}.get(row)
    return " " * _AXIS if value is None else f"{value:{_AXIS - 2}.2f}  "
