"""All plots of a suite, written to files."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt

from benchmarks.learn.plots.ablation_effects import ablation_effects
from benchmarks.learn.plots.forgetting_scatter import forgetting_scatter
from benchmarks.learn.plots.plot_file import PlotFile
from benchmarks.learn.plots.prequential import prequential
from benchmarks.learn.plots.style import DPI
from benchmarks.learn.plots.task_dumbbells import task_dumbbells
from benchmarks.learn.run_files import RunResult
from benchmarks.learn.tables import Summary


def draw(summary: Summary, runs: Sequence[RunResult], folder: Path) -> list[PlotFile]:
    """Write the plots of one suite as SUITE-NAME.png; plots without data are left out."""
    drawings = {
        "forgetting": forgetting_scatter(summary),
        "tasks": task_dumbbells(summary),
        "stream": prequential(runs),
        "ablations": ablation_effects(summary),
    }
    files = []
    for name, drawing in drawings.items():
        if drawing is not None:
            figure, title, alt = drawing
            title = f"{summary['suite']} on {summary['setting']['backbone']['model']}: {title}"
            figure.suptitle(title, fontsize=11, x=0.01, ha="left")
            files.append(PlotFile(folder / f"{summary['suite']}-{name}.png", title, f"{title}. {alt}"))
            figure.savefig(files[-1].file, dpi=DPI)
            plt.close(figure)
    return files
