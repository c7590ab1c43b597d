"""Plots of a suite's runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws to files and opens no window

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from streamlearn.bench.learn.methods import ABLATIONS
from streamlearn.bench.learn.summary import RunResult, by_method, summarise

Runs = Sequence[RunResult]

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#F0E442",
    "#000000",
)  # Okabe and Ito
STYLES = ("-", "--", ":")
COMPARED = ("streamlearn", "lora")
"""Methods in the plot of the prequential loss."""
LABEL_CHARS = 14
DIFFERENCES = {
    "AP": "change in AP (right: higher final accuracy)",
    "AF": "change in AF (right: more forgetting)",
}
"""Score of an ablation -> axis label of its difference from the unchanged method."""


def draw(runs: Runs, folder: Path) -> list[Path]:
    """Write the plots of one suite and return their files."""
    methods = {name: group for name, group in by_method(runs).items() if name not in ABLATIONS}
    suite = runs[0]["suite"]
    figures = {name: plot(methods) for name, plot in PLOTS.items()} if methods else {}
    figures["ablations"] = ablations(summarise(runs)["ablations"])
    files = []
    for name, figure in figures.items():
        if figure is not None:
            files.append(folder / f"{suite}-{name}.png")
            figure.savefig(files[-1], dpi=110)
            plt.close(figure)
    return files


def forgetting(methods: Mapping[str, Runs]) -> Any:
    """Mean accuracy after each segment, over the tasks seen so far."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for place, (name, runs) in enumerate(methods.items()):
        numbers, curves = _seen_accuracy(runs)
        mean, spread = curves.mean(0), curves.std(0)
        colour, style = COLOURS[place % len(COLOURS)], STYLES[place // len(COLOURS)]
        width = 2.2 if name == "streamlearn" else 1.3
        axis.plot(numbers, mean, label=name, marker="o", markersize=3, linewidth=width, color=colour, linestyle=style)
        axis.fill_between(numbers, mean - spread, mean + spread, alpha=0.12, color=colour, linewidth=0)
    axis.set_xlabel("segments trained on")
    axis.set_ylabel("token accuracy, mean over tasks seen so far\n(band: standard deviation over seeds)")
    axis.legend(ncols=2, frameon=False, fontsize=8)
    return figure


def matrices(methods: Mapping[str, Runs]) -> Any:
    """Accuracy on each task after each segment, one panel per method."""
    columns = min(4, len(methods))
    rows = -(-len(methods) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 3.2 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(methods) :]:
        axis.set_visible(False)
    image: Any = None
    for place, (axis, (name, runs)) in enumerate(zip(axes.flat, methods.items(), strict=False)):
        tasks = list(dict.fromkeys(task for segment in runs[0]["stretches"] for task in segment["tasks"]))
        R = np.ma.masked_invalid([_matrix(run, tasks) for run in runs]).mean(axis=0)
        image = axis.imshow(R, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axis.set_title(f"{name} (n={len(runs)})", fontsize=9)
        axis.set_xticks(range(len(tasks)), [task[:LABEL_CHARS] for task in tasks], rotation=90, fontsize=6)
        axis.set_yticks(range(len(R)), [f"{row + 1}" for row in range(len(R))], fontsize=6)
        if place % columns == 0:
            axis.set_ylabel("after segment", fontsize=8)
    figure.colorbar(image, ax=axes, label="token accuracy", shrink=0.8)
    return figure


def stream(methods: Mapping[str, Runs]) -> Any:
    """Prequential loss over the stream, with the true boundaries and the declared shifts."""
    shown = [methods[name][0] for name in COMPARED if name in methods]
    if not shown:
        return None
    figure, axis = plt.subplots(figsize=(11, 4), layout="constrained")
    edges = np.cumsum([segment["records"] for segment in shown[0]["stretches"]])
    for edge in edges[:-1]:
        axis.axvline(edge, color="0.8", linewidth=1)
    for run, colour in zip(shown, COLOURS, strict=False):
        losses = run["prequential"]
        width = losses["bin_records"]
        centres = np.arange(len(losses["losses"])) * width + width / 2
        axis.plot(centres, losses["losses"], label=f"{run['method']}, seed {run['seed']}", color=colour, linewidth=1.3)
    declared = [report["shift"] for report in (shown[0]["detection"] or {}).get("shifts", ())]
    for kind, label, marker in (("inputs", "input shift", "v"), ("answers", "concept drift", "x")):
        at = [shift["declared_at"] for shift in declared if shift["kind"] == kind]
        if at:
            height = [1.02] * len(at)
            axis.plot(
                at, height, marker, color="0.2", transform=axis.get_xaxis_transform(), clip_on=False,
                label=f"{label} declared",
            )  # fmt: skip
    axis.set_xlabel("records (vertical lines: true boundaries)")
    axis.set_ylabel("prequential loss,\nnats per answer token")
    axis.legend(frameon=False, fontsize=8)
    return figure


def experts(methods: Mapping[str, Runs]) -> Any:
    """Share of each regime's test tokens that each expert of the middle layer receives."""
    shown = [(name, runs[0]) for name, runs in methods.items() if runs[0]["experts"] is not None][:4]
    if not shown:
        return None
    figure, axes = plt.subplots(len(shown), 1, figsize=(9, 2.6 * len(shown)), layout="constrained", squeeze=False)
    for axis, (name, run) in zip(axes[:, 0], shown, strict=True):
        _draw_shares(axis, name, run["experts"])
    return figure


def ablations(changed: Mapping[str, Mapping[str, Any]]) -> Any:
    """Effect of each ablation on AP and AF: mean and standard deviation over seeds."""
    known = {name: each["differences"] for name, each in changed.items() if each["differences"]["AP"] is not None}
    if not known:
        return None
    size = (10, 0.28 * len(known) + 1)
    figure, axes = plt.subplots(1, len(DIFFERENCES), figsize=size, layout="constrained", sharey=True)
    for axis, (score, label), colour in zip(axes, DIFFERENCES.items(), COLOURS, strict=False):
        figures = [differences[score] for differences in known.values()]
        means = [figure["mean"] for figure in figures]
        axis.barh(
            range(len(known)), means, xerr=[figure["sd"] or 0.0 for figure in figures], color=colour, ecolor="0.3"
        )
        axis.axvline(0, color="0.2", linewidth=0.8)
        axis.set_xlabel(label, fontsize=8)
        axis.locator_params(axis="x", nbins=6)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_yticks(range(len(known)), list(known), fontsize=8)
    axes[0].set_ylim(len(known) - 0.4, -0.6)
    return figure


PLOTS = {"forgetting": forgetting, "matrices": matrices, "stream": stream, "experts": experts}


def _draw_shares(axis: Axes, name: str, usage: Mapping[str, Any]) -> None:
    share_GHK = np.array(list(usage["share"].values()))
    num_heads, num_experts = share_GHK.shape[1:]
    image = axis.imshow(share_GHK.reshape(len(share_GHK), -1), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for head in range(1, num_heads):
        axis.axvline(head * num_experts - 0.5, color="0.6", linewidth=0.8)
    axis.set_title(f"{name}: {usage['layer']}, N_eff {usage['n_eff']:.1f}", fontsize=9)
    axis.set_ylabel("regime")
    axis.set_yticks(range(len(share_GHK)), list(usage["share"]), fontsize=7)
    axis.set_xlabel(f"expert ({num_heads} head{'s' if num_heads > 1 else ''} of {num_experts})")
    plt.colorbar(image, ax=axis, label="share of tokens")


def _matrix(run: Mapping[str, Any], tasks: Sequence[str]) -> Any:
    missing = float("nan")
    return np.array([[row[task]["accuracy"] if task in row else missing for task in tasks] for row in run["matrix"]])


def _seen_accuracy(runs: Runs) -> tuple[list[int], Any]:
    """Segments after which every task seen was evaluated, and the mean accuracies (runs, segments)."""
    segments = [segment["tasks"] for segment in runs[0]["stretches"]]
    numbers, rows = [], []
    for number in range(len(segments)):
        seen = {task for tasks in segments[: number + 1] for task in tasks}
        if all(seen <= run["matrix"][number].keys() for run in runs):
            numbers.append(number + 1)
            rows.append([np.mean([run["matrix"][number][task]["accuracy"] for task in seen]) for run in runs])
    return numbers, np.array(rows).T
