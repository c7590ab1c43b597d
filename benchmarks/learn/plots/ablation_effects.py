"""Differences of the ablations from the method that they change, with their intervals."""

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.learn.plots.style import BLUE, GREY, ORANGE
from benchmarks.learn.tables import Summary

PANELS = {"AP": "difference in AP, score at the end", "BWT": "difference in backward transfer"}


def ablation_effects(summary: Summary) -> tuple[Figure, str, str] | None:
    """Draw the plot; None without ablations."""
    rows = {name: row for name, row in summary["ablations"].items() if row["differences"]["AP"] is not None}
    if not rows:
        return None
    figure, axes = plt.subplots(1, len(PANELS), figsize=(10, 0.3 * len(rows) + 1.6), layout="constrained", sharey=True)
    for axis, (figure_name, label) in zip(axes, PANELS.items(), strict=True):
        for place, row in enumerate(rows.values()):
            found = row["differences"][figure_name]
            if found is not None:
                colour = BLUE if found["high"] < 0 else ORANGE if found["low"] > 0 else GREY
                axis.plot([found["low"], found["high"]], [place, place], color=colour, linewidth=1.6)
                axis.plot(found["value"], place, "o", color=colour, markersize=5)
        axis.axvline(0, color="0.2", linewidth=0.8, zorder=0)
        axis.set_xlabel(f"{label}\n(ablation less what it changes; bars: 95 % intervals)", fontsize=8.5)
        axis.locator_params(axis="x", nbins=6)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), list(rows), fontsize=8.5)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    worse = [name for name, row in rows.items() if row["differences"]["AP"]["high"] < 0]
    title = "effect of removing or changing one part (blue: worse without it; orange: better)"
    return figure, title, f"Ablations with a lower AP, by their interval: {', '.join(worse) if worse else 'none'}."
