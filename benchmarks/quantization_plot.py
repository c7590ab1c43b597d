"""Plot of training with quantised backbones: loss curves, loss afterwards, and memory."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files and opens no window

from matplotlib import pyplot as plt

COLOURS = {"none": "#666666", "int8": "#0072B2", "nf4": "#D55E00"}  # Okabe and Ito


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot; the suffix of `path` selects the format."""
    figure, (curves, after, memory) = plt.subplots(
        1, 3, figsize=(13, 4), layout="constrained", gridspec_kw={"width_ratios": [3, 2, 2]}
    )
    for run in result["runs"]:
        label = run["kind"] if run["seed"] == 0 else None
        means = [total / number for number, total in enumerate(accumulate(run["losses"]), start=1)]
        curves.plot(range(1, len(means) + 1), means, color=COLOURS[run["kind"]], linewidth=1.2, alpha=0.8, label=label)
        place = list(COLOURS).index(run["kind"])
        after.plot([place], [run["scored_after"]], "o", color=COLOURS[run["kind"]])
        after.plot([place], [run["scored_before"]], "o", color=COLOURS[run["kind"]], fillstyle="none")
    curves.set(title="Prequential loss, mean so far, one line a seed", xlabel="step", ylabel="nats per token")
    curves.legend(frameon=False)
    after.set(title="Loss of other records:\nempty before training, full after it")
    summaries = [result["summary"][kind] for kind in COLOURS]
    colours, places = list(COLOURS.values()), range(len(COLOURS))
    peaks = memory.bar(places, [each["peak_mib"] for each in summaries], color=colours, alpha=0.35)
    bars = memory.bar(places, [each["backbone_mib"] for each in summaries], color=colours)
    memory.bar_label(peaks, fmt="%.0f")
    memory.bar_label(bars, fmt="%.0f", padding=2)
    memory.set(title="MiB: weights of the backbone,\nand the process at its peak")
    for axis in (after, memory):
        axis.set_xticks(places, list(COLOURS))
    for axis in (curves, after, memory):
        axis.spines[["top", "right"]].set_visible(False)
    setting = result["setting"]
    figure.suptitle(f"{setting['backbone']}, {setting['records']} records, {setting['seeds']} seeds", fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)
