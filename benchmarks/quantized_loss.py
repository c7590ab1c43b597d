"""What a quantised backbone costs in loss, and what it saves in memory.

    streamlearn bench quantization --backbone FOLDER --json --plot docs/quantization.png > docs/quantization.json

Each run is a process of its own that learns the same number of records of the bundled sample with the default preset
(`quantized_run`). The unquantised backbone shows how far runs differ by their seed only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import orjson
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import drawing, in_own_process
from streamlearn.settings import Quantization

LOSSES = ("prequential_loss", "scored_before", "scored_after")
MEMORY = ("backbone_mib", "peak_mib", "step_s")
KINDS: tuple[Quantization, ...] = get_args(Quantization)


def report(*, backbone: Path | None, records: int, seeds: int, as_json: bool, plot: Path | None) -> None:
    """Make the runs, draw to `plot` if given, and print.

    Raises:
        UsageError: the plot cannot be written; raised before anything is measured.
        MeasurementError: a run failed.
    """
    draw = None if plot is None else drawing(plot, "benchmarks.quantization_plot")
    folder = None if backbone is None else str(backbone)
    runs = [
        in_own_process(
            "benchmarks.quantized_run",
            {"kind": kind, "seed": seed, "records": records, "backbone": folder},
        )
        for seed in range(seeds)
        for kind in KINDS
    ]
    result: dict[str, Any] = {
        "summary": {kind: summary(kind, runs) for kind in KINDS},
        "runs": runs,
        "setting": {
            "backbone": "nano" if backbone is None else backbone.name,
            "records": records,
            "seeds": seeds,
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
        },
    }
    if draw is not None:
        draw(result)
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        Console().print(table(result["summary"]))


def summary(kind: Quantization, runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over the seeds and, for losses, how far the seeds lie apart and the mean difference from `none`.

    Differences are between runs of one seed, which learn the same records in the same order from the same experts.
    """
    of_kind = [run for run in runs if run["kind"] == kind]
    unquantized = {run["seed"]: run for run in runs if run["kind"] == "none"}
    figures = {name: round(mean(run[name] for run in of_kind), 4) for name in (*LOSSES, *MEMORY)}
    for name in LOSSES:
        values = [run[name] for run in of_kind]
        figures[f"{name}_range"] = round(max(values) - min(values), 4)
        figures[f"{name}_over_none"] = round(mean(run[name] - unquantized[run["seed"]][name] for run in of_kind), 4)
    return figures


def table(summaries: Mapping[str, Mapping[str, float]]) -> Table:
    """Build the table of means."""
    shown = Table("", *summaries, box=None, pad_edge=False)
    for name in next(iter(summaries.values())):
        shown.add_row(name, *(f"{each[name]:,.4g}" for each in summaries.values()))
    return shown
