"""Plot of the comparison: test loss over iterations at both noise levels, and the routing matrix of MoT."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws to files and opens no window

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = {  # Okabe and Ito; the last one is a lighter shade
    "mot": "#0072B2",
    "transformer": "#D55E00",
    "attention_free": "#009E73",
    "mot_given": "#56B4E9",
    "attention_free_given": "#8DD3B5",
}
SHOWN = 0.005
"""Minimum share of a class for an expert to be shown."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot; the suffix of `path` selects the format."""
    levels = result["noise"]
    figure, axes = plt.subplots(
        1, len(levels) + 1, figsize=(15, 5.2), layout="constrained", width_ratios=[1.25] * len(levels) + [1]
    )
    for axis, (level, found) in zip(axes, levels.items(), strict=False):
        losses(axis, level, found, result["setting"]["schedule"])
    axes[0].set_ylabel("test loss, nats (mean over seeds; band: lowest to highest)")
    level, found = next(iter(levels.items()))
    matrix(axes[-1], level, found["models"]["mot"]["routing"][0])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def losses(axis: Axes, level: str, found: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Draw one noise level: one line per model, the stages, and the closed-form floor if it is in range."""
    for name, model in found["models"].items():
        curve = model["curve"]
        given = name.endswith("_given")
        mean, lowest, highest = (
            10 ** np.asarray(curve[key]) for key in ("log10_loss", "log10_loss_lowest", "log10_loss_highest")
        )
        style = "--" if given else "-"
        axis.plot(curve["iteration"], mean, style, color=COLOURS[name], lw=1.8, label=model["title"])
        axis.fill_between(curve["iteration"], lowest, highest, color=COLOURS[name], alpha=0.15, lw=0)
    axis.set_yscale("log")
    bottom, top = axis.get_ylim()
    floor = found["attention_free_floor"]
    if floor > bottom:
        axis.axhline(floor, color="black", lw=1, ls=":")
        axis.text(0.05 * schedule["iterations"], 0.9 * floor, "floor without attention", va="top", fontsize=9)
    ends = [0, schedule["stage_1_ends"], schedule["stage_2_ends"], schedule["iterations"]]
    for end in ends[1:3]:
        axis.axvline(end, color="grey", lw=0.8, ls=(0, (4, 4)))
    for name, start, end in zip(("I", "II", "III"), ends, ends[1:], strict=False):
        axis.annotate(name, ((start + end) / 2, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top")
    axis.set(xlabel="iteration", xlim=(0, schedule["iterations"]), ylim=(bottom, top * 3))
    axis.set_title(f"{level} noise, sigma = {found['mixture']['noise']}")


def matrix(axis: Axes, level: str, routing: dict[str, Any]) -> None:
    """Draw experts by classes, ordered by their main class."""
    share_MN = np.asarray(routing["matrix"])
    experts = [m for m in range(len(share_MN)) if share_MN[m].max() >= SHOWN]
    experts.sort(key=lambda m: (share_MN[m].argmax(), -share_MN[m].max()))
    shown_MN = share_MN[experts]
    image = axis.imshow(shown_MN, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(shown_MN):
        if share >= SHOWN:
            axis.text(column, row, f"{share:.0%}", ha="center", va="center", color="white" if share > 0.5 else "black")
    axis.set_xticks(range(shown_MN.shape[1]), [str(n + 1) for n in range(shown_MN.shape[1])])
    axis.set_yticks(range(len(experts)), [str(m + 1) for m in experts])
    axis.set(xlabel="class", ylabel=f"expert ({len(share_MN) - len(experts)} unused, not shown)")
    purity = f"purity {routing['purity']:.1%} (after stage I: {routing['purity_stage_1']:.1%})"
    axis.set_title(f"MoT routing, {level} noise, first seed\n{purity}")
    axis.figure.colorbar(image, ax=axis, label="share of the test samples of the class")
