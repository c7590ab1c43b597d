"""Colours, and labels at the right edge of a plot that do not overlap."""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # draws to files and opens no window

from matplotlib.axes import Axes

from benchmarks.learn.skill import CEILINGS, CONTROL

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#007A5A", "#666666"  # Okabe and Ito, green darkened for text
DPI = 120
LEADER = {"arrowstyle": "-", "linewidth": 0.6, "alpha": 0.5, "shrinkB": 3, "relpos": (0, 0.5)}
COLOURS = {"streamlearn": BLUE, "lora": ORANGE, **dict.fromkeys((*CEILINGS, CONTROL), GREEN)}


def colour_of(method: str) -> str:
    """Return the colour of a method: its own, that of ceilings and controls, or grey."""
    return COLOURS.get(method, GREY)


class EdgeLabel(NamedTuple):
    """A text at the right edge, and the point that its line leads to."""

    text: str
    x: float
    y: float
    colour: str


def label_at_edge(axis: Axes, labels: Sequence[EdgeLabel], *, lines: int = 1, font_size: float = 8.5) -> None:
    """Write the labels to the right of the axes, each on its own line, with a thin line to its point.

    The limits of the axes must be final.
    """
    low, high = axis.get_ylim()
    height = axis.get_figure().get_size_inches()[1] * axis.get_position().height  # type: ignore[union-attr]
    gap = (high - low) * 1.35 * lines * font_size / 72 / height  # the lines of a label, in units of y
    ordered = sorted(labels, key=lambda label: label.y)
    heights = spaced([label.y for label in ordered], gap, low, high)
    for label, y in zip(ordered, heights, strict=True):
        axis.annotate(
            label.text, xy=(label.x, label.y), xytext=(1.04, (y - low) / (high - low)), textcoords=axis.transAxes,
            color=label.colour, fontsize=font_size, va="center", annotation_clip=False,
            arrowprops={**LEADER, "color": label.colour},
            weight="bold" if label.colour == BLUE else "normal",
        )  # fmt: skip


def spaced(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move sorted heights apart to at least `gap`, and into the range: groups that overlap are centred on their mean.

    >>> spaced([0.0, 0.5, 0.5, 1.0], 0.25, 0.0, 1.0)
    [0.0, 0.375, 0.625, 1.0]
    """
    groups: list[tuple[list[float], float]] = []  # the heights wanted, and where the group starts
    for height in heights:
        wanted, start = [height], min(max(height, low), high)
        while groups and groups[-1][1] + gap * len(groups[-1][0]) > start:
            wanted = groups.pop()[0] + wanted
            start = sum(wanted) / len(wanted) - gap * (len(wanted) - 1) / 2
            start = max(min(start, high - gap * (len(wanted) - 1)), low)
        groups.append((wanted, start))
    return [start + gap * place for wanted, start in groups for place in range(len(wanted))]
