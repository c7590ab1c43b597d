"""Score at the end against backward transfer, a point per method."""

from collections.abc import Mapping
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.learn.plots.style import EdgeLabel, colour_of, label_at_edge
from benchmarks.learn.run_files import BLIND, FROZEN
from benchmarks.learn.tables import Summary

MARGINS = {"left": 0.09, "right": 0.74, "top": 0.92, "bottom": 0.11}


def forgetting_scatter(summary: Summary) -> tuple[Figure, str, str] | None:
    """Draw the plot; None without a method that has learned tasks in their order."""
    methods = summary["methods"]
    ceiling = summary["skill_scale"]["ceiling"]
    points = {
        name: row["intervals"]
        for name, row in methods.items()
        if name not in (BLIND, FROZEN) and row["intervals"]["BWT"] is not None
    }
    if not points:
        return None
    figure, axis = plt.subplots(figsize=(9.5, 6))
    figure.subplots_adjust(**MARGINS)
    for name, found in points.items():
        AP, BWT = found["AP"], found["BWT"]
        axis.errorbar(
            BWT["value"], AP["value"], xerr=_bars(BWT), yerr=_bars(AP), fmt="o", color=colour_of(name),
            ecolor=colour_of(name), elinewidth=0.9, alpha=0.9, markersize=8 if name == "streamlearn" else 5,
            zorder=3 if name == "streamlearn" else 2,
        )  # fmt: skip
    lines = {name: methods[name]["intervals"]["AP"]["value"] for name in (BLIND, FROZEN, ceiling) if name in methods}
    for name, AP in lines.items():
        axis.axhline(AP, color=colour_of(name), linestyle="--", linewidth=1, zorder=0)
    axis.axvline(0, color="0.8", linewidth=1, zorder=0)
    axis.margins(0.06)
    axis.set_xlabel("backward transfer: change in score since a task's last segment (left of 0: forgets)")
    axis.set_ylabel("AP: score of free answers at the end, mean over tasks (0 to 1)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlim(axis.get_xlim())
    axis.set_ylim(axis.get_ylim())
    label_at_edge(axis, [*_labels_of_points(points), *_labels_of_lines(lines, ceiling, axis.get_xlim()[1])])
    axis.text(0, 1.01, "blue: streamlearn; orange: lora; green: ceilings and controls; grey: all others",
              transform=axis.transAxes, fontsize=8.5, color="0.3")  # fmt: skip
    best = max(points, key=lambda name: points[name]["AP"]["value"])
    title = f"score at the end against forgetting, {len(points)} methods (bars: 95 % intervals)"
    return figure, title, f"Highest score at the end: {best}, {_value(points[best]['AP'])}. {_default(points)}"


def _labels_of_points(points: Mapping[str, Any]) -> list[EdgeLabel]:
    return [
        EdgeLabel(f"{name} {found['AP']['value']:.2f}", found["BWT"]["value"], found["AP"]["value"], colour_of(name))
        for name, found in points.items()
    ]


def _labels_of_lines(lines: Mapping[str, float], ceiling: str | None, right: float) -> list[EdgeLabel]:
    return [
        EdgeLabel(f"{name} {AP:.2f} (dashed{', ceiling' if name == ceiling else ''})", right, AP, colour_of(name))
        for name, AP in lines.items()
    ]


def _bars(found: Any) -> Any:
    return [[found["value"] - found["low"]], [found["high"] - found["value"]]]


def _value(found: Any) -> str:
    return f"{found['value']:.3f}"


def _default(points: Any) -> str:
    found = points.get("streamlearn")
    if found is None:
        return "All figures are in the table of answers."
    return f"streamlearn: {_value(found['AP'])}, with a backward transfer of {_value(found['BWT'])}."
