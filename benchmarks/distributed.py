"""Several processes beside one, on this machine's CPU with one thread each: are the weights the same, and how fast?

    streamlearn bench distributed --json

`distributed_rank` is what each process runs.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import MeasurementError


def report(*, processes: int, rounds: int, folder: Path | None, as_json: bool) -> None:
    """Measure and print.

    Args:
        processes: How many take part.
        rounds: Steps of each kind whose speeds are compared.
        folder: Of a causal language model; None: the bundled one.
        as_json: Print JSON instead of a table.

    Raises:
        MeasurementError: a process failed.
    """
    result = measure(processes=processes, rounds=rounds, folder=folder)
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        Console().print(table(result))


def measure(*, processes: int, rounds: int, folder: Path | None) -> dict[str, Any]:
    """Run the processes and return the figures of the leader; arguments and errors as those of `report`."""
    with TemporaryDirectory(prefix="streamlearn-") as scratch:
        out = Path(scratch) / "figures.json"
        options = {"rounds": rounds, "folder": None if folder is None else str(folder), "out": str(out)}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        rank = ["-m", "benchmarks.distributed_rank", orjson.dumps(options).decode()]
        done = subprocess.run(
            [sys.executable, *launcher, *rank],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise MeasurementError(f"a process of the measurement failed: {done.stderr[-2000:]}")
        figures: dict[str, Any] = orjson.loads(out.read_bytes())
        return figures


def table(result: dict[str, Any]) -> Table:
    """Build the table of figures."""
    shown = Table("", f"{result['processes']} processes", box=None, pad_edge=False)
    for name, value in result.items():
        if name != "processes":
            shown.add_row(name.replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value))
    return shown
