"""Plot of what many regimes cost: speed, memory, and the size of a snapshot."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files and opens no window

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot; the suffix of `path` selects the format."""
    rows = result["checkpoints"]
    regimes = [row["regimes"] for row in rows]
    figure, (speed, memory, disk) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    _line(speed, regimes, [row["step_over_one_regime"] for row in rows], BLUE, "training step")
    speed.axhspan(0.95, 1.05, color=GREY, alpha=0.12, linewidth=0)
    speed.set(title="Speed, relative to a learner with one regime", ylim=(0, 1.3))
    _line(memory, regimes, [row["memory_mib"] for row in rows], BLUE, "process")
    memory.set(title="Resident memory, MiB")
    _line(disk, regimes, [row["snapshot_mib"] for row in rows], BLUE, "size of a snapshot")
    _line(disk, regimes, [row["new_mib"] for row in rows], ORANGE, "written, the rest is linked")
    disk.set(title="Snapshot, MiB")
    for axis in (speed, memory, disk):
        axis.set_xlabel("regimes")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    memory.axvline(result["max_in_memory"], color=GREY, linewidth=1, linestyle=":")
    memory.annotate(
        f"{result['max_in_memory']} adapters in memory,\nfurther ones at rest in files",
        (result["max_in_memory"], memory.get_ylim()[1] * 0.08),
        xytext=(8, 0), textcoords="offset points", color=GREY, fontsize=9,
    )  # fmt: skip
    disk.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _line(axis: Axes, x: list[int], y: list[float], colour: str, label: str) -> None:
    axis.plot(x, y, marker="o", markersize=4, color=colour, label=label)
