"""Score of each task right after its last segment and at the end, for three methods."""

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.learn.plots.style import GREY, colour_of
from benchmarks.learn.run_files import BLIND, FROZEN
from benchmarks.learn.tables import Summary

MARKS = {BLIND: "x", FROZEN: "|"}
STEP = 0.24
"""Distance between two methods of one task, in rows."""


def task_dumbbells(summary: Summary) -> tuple[Figure, str, str] | None:
    """Draw the plot; None without a trained method."""
    tasks = {task: row for task, row in summary["tasks"].items() if not row["unseen"]}
    shown = [name for name in next(iter(tasks.values()))["methods"] if name not in MARKS]
    shown.sort(key=["streamlearn", "lora"].__contains__, reverse=True)
    if not shown:
        return None
    figure, axis = plt.subplots(figsize=(9, 0.62 * len(tasks) + 1.9), layout="constrained")
    for place, row in enumerate(tasks.values()):
        for number, name in enumerate(shown):
            scores, y = row["methods"][name], place + STEP * (number - (len(shown) - 1) / 2)
            colour = colour_of(name)
            axis.plot(
                [scores["low"], scores["high"]], [y, y], color=colour, linewidth=5, alpha=0.2, solid_capstyle="butt"
            )
            axis.plot(scores["end"], y, "o", color=colour, markersize=6)
            if scores["after"] is not None:
                axis.plot([scores["after"], scores["end"]], [y, y], color=colour, linewidth=1.4)
                axis.plot(scores["after"], y, "o", markerfacecolor="white", markeredgecolor=colour, zorder=1.9)
        for name, mark in MARKS.items():
            if name in row["methods"]:
                axis.plot(row["methods"][name]["end"], place, mark, color="0.25", markersize=9)
        axis.axhline(place + 0.5, color="0.9", linewidth=0.8)
    labels = [f"{task}\n{row['metric'].replace('_', ' ')}, {row['records']} records" for task, row in tasks.items()]
    axis.set_yticks(range(len(tasks)), labels, fontsize=8)
    axis.set_ylim(len(tasks) - 0.5, -0.5)
    axis.set_xlim(-0.02, 1.02)
    axis.set_xlabel("mean score of free answers in the task's metric (0 to 1)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=_handles(shown, summary), loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    title = "score of each task after its segment and at the end"
    return figure, title, f"Methods: {', '.join(shown)}. The figures are in the table by task."


def _handles(shown: list[str], summary: Summary) -> list[Line2D]:
    ceiling = summary["skill_scale"]["ceiling"]
    names = [(f"{name} (ceiling)" if name == ceiling else name, colour_of(name)) for name in shown]
    methods = [Line2D([], [], color=colour, marker="o", label=name) for name, colour in names]
    present = next(iter(summary["tasks"].values()))["methods"]
    marks = [
        Line2D([], [], color="0.25", marker=mark, linestyle="", label=name)
        for name, mark in MARKS.items()
        if name in present
    ]
    return [
        *methods,
        *marks,
        Line2D([], [], marker="o", linestyle="", markerfacecolor="white", color=GREY, label="after its last segment"),
        Line2D([], [], marker="o", linestyle="", color=GREY, label="at the end"),
        Line2D([], [], color=GREY, linewidth=5, alpha=0.3, label="95 % interval at the end"),
    ]
