"""What all benchmarks share: the bundled sample, memory, processes of their own, and the command line."""

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console, RenderableType

from streamlearn.errors import StreamlearnError, UsageError
from streamlearn.events import configure_logging
from streamlearn.settings.file import packaged_folder

SAMPLE = packaged_folder("configs") / "sample/superni.train.jsonl.gz"
SHARED = Path("../shared/data")
OTHERS = SHARED / "pretrain/superni_other.jsonl.gz"
"""Texts of other tasks: {text, source}, JSON Lines, gzip."""
ERROR_LINES = 20
"""Lines of a failed process's output that its error quotes: the end of its traceback."""
PLOTS = (".png", ".pdf", ".svg")


class MeasurementError(StreamlearnError):
    """A process that measures failed; run it again once the cause, which the message quotes, is gone."""


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the benchmark's docstring as its help, and `--json`."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return options


def command(main: Callable[[], None]) -> None:
    """Run a benchmark; an expected error ends it with its message and its exit code."""
    configure_logging("error")
    try:
        main()
    except StreamlearnError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def show(result: Mapping[str, Any], *tables: RenderableType, as_json: bool, width: int | None = None) -> None:
    """Print a result as JSON, or as the given tables."""
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
        return
    console = Console(width=width, highlight=False)
    for table in tables:
        console.print(table)


def check_plot(path: Path) -> Path:
    """Return the path of a plot.

    Raises:
        UsageError: it cannot be written.
    """
    if path.suffix not in PLOTS or not path.absolute().parent.is_dir():
        raise UsageError(f"--plot: expected a file {', '.join(PLOTS)} in an existing folder, found {path}")
    return path


def in_own_process(module: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run `python -m MODULE OPTIONS`, options as JSON, and return the JSON object on the last line that it prints.

    The peak memory of one measurement is then not that of another.

    Raises:
        MeasurementError: the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, orjson.dumps(options).decode()], capture_output=True, check=False
    )
    if done.returncode:
        last = "\n".join(done.stderr.decode(errors="replace").splitlines()[-ERROR_LINES:])
        raise MeasurementError(f"{module} {dict(options)}: exit code {done.returncode}\n{last}")
    result: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return result


def peak_mib(*, restart: bool = False) -> float:
    """Return the peak resident memory since the process started, or since the last call with `restart`.

    `restart` has an effect on Linux only.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if restart:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_mib("VmHWM:")


def resident_mib() -> float:
    """Return the present resident memory; needs Linux."""
    return _status_mib("VmRSS:")


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
