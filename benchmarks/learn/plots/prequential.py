"""Prequential loss along the stream."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.learn.plots.style import EdgeLabel, colour_of, label_at_edge
from benchmarks.learn.run_files import RunResult, by_method

COMPARED = ("streamlearn", "lora")
BIN = 10
"""Records per point, about: bins do not cross boundaries, and those of a segment have the same size."""
LABEL_CHARS = 16
MARGINS = {"left": 0.07, "right": 0.86, "bottom": 0.13}
HEIGHT = 4.8
CHAR = 0.07
"""Length of a character of a task's name, in inches."""


def prequential(runs: Sequence[RunResult]) -> tuple[Figure, str, str] | None:
    """Draw the plot: mean over seeds, and their range as a band; None without runs of the compared methods."""
    groups = {name: group for name, group in by_method(runs).items() if name in COMPARED and group[0]["record_losses"]}
    if not groups:
        return None
    segments = runs[0]["segments"]
    edges = np.cumsum([0, *(segment["records"] for segment in segments)])
    figure, axis = plt.subplots(figsize=(11, HEIGHT))
    names = min(LABEL_CHARS, max(len(task) for segment in segments for task in segment["tasks"]))
    figure.subplots_adjust(**MARGINS, top=1 - (0.5 + CHAR * names) / HEIGHT)
    ends = []
    for name, group in groups.items():
        curves = [_binned(run["record_losses"], edges) for run in group]
        values_RB, at_B = np.array([values for _, values in curves]), curves[0][0]
        axis.plot(at_B, values_RB.mean(0), color=colour_of(name), linewidth=1.4)
        axis.fill_between(at_B, values_RB.min(0), values_RB.max(0), color=colour_of(name), alpha=0.15, linewidth=0)
        mean = np.mean([run["record_losses"][: edges[-1]] for run in group])
        label = f"{name}\nmean {mean:.2f}"
        ends.append(EdgeLabel(label, float(at_B[-1]), float(values_RB.mean(0)[-1]), colour_of(name)))
    axis.set_xlim(0, edges[-1])
    axis.set_ylim(0, axis.get_ylim()[1])
    _draw_segments(axis, segments, edges)
    _draw_shifts(axis, groups)
    axis.set_xlabel(
        f"records of the stream (mean of about {BIN} records; vertical lines: true boundaries; "
        "triangles: declared input shifts, first seed)"
    )
    axis.set_ylabel("loss before training on a record,\nnats per answer token")
    axis.spines[["top", "right"]].set_visible(False)
    label_at_edge(axis, ends, lines=2)
    seeds = max(len(group) for group in groups.values())
    over = f" (mean of {seeds} seeds, band: their range)" if seeds > 1 else ""
    title = f"loss before learning, along the stream{over}"
    return figure, title, "; ".join(label.text.replace("\n", ": ") for label in ends) + " nats per answer token."


def _draw_segments(axis: Axes, segments: Sequence[Any], edges: Any) -> None:
    for edge in edges[1:-1]:
        axis.axvline(edge, color="0.8", linewidth=1, zorder=0)
    for segment, start, end in zip(segments, edges[:-1], edges[1:], strict=True):
        text = "\n".join(task[:LABEL_CHARS] for task in segment["tasks"])
        axis.text(
            (start + end) / 2, 1.02, text, transform=axis.get_xaxis_transform(), rotation=90, fontsize=7.5,
            ha="center", va="bottom", color="0.3",
        )  # fmt: skip


def _draw_shifts(axis: Axes, groups: Mapping[str, Sequence[RunResult]]) -> None:
    """Mark the input shifts declared in the run with the first seed; that at record 1 opens the first regime."""
    for name, group in groups.items():
        shifts = [report["shift"] for report in (group[0]["detection"] or {}).get("shifts", ())]
        at = [shift["declared_at"] for shift in shifts if shift["kind"] == "inputs" and shift["declared_at"] > 1]
        transform = axis.get_xaxis_transform()
        axis.plot(at, [0.02] * len(at), "^", color=colour_of(name), markersize=5, transform=transform)


def _binned(losses: Sequence[float], edges: Any) -> tuple[Any, Any]:
    """Centres and mean losses of the bins of every segment; a NaN before each boundary, where the line is broken."""
    centres: list[float] = []
    means: list[float] = []
    for first, last in pairwise(edges):
        bounds = np.linspace(first, last, max(1, round((last - first) / BIN)) + 1).round().astype(int)
        for start, end in pairwise(bounds.tolist()):
            centres.append((start + end) / 2)
            means.append(float(np.mean(losses[start:end])))
        centres.append(last)
        means.append(np.nan)
    return np.array(centres[:-1]), np.array(means[:-1])
