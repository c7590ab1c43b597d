"""What all benchmarks share: the bundled sample, memory, processes of their own, and the command line."""

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from streamlearn.cli.options import MAX_NUMBER, Number, number
from streamlearn.errors import StreamlearnError
from streamlearn.events import configure_logging
from streamlearn.settings.settings import packaged_folder

SAMPLE = packaged_folder("configs") / "sample/superni.train.jsonl.gz"
SHARED = Path("../shared/data")
OTHERS = SHARED / "pretrain/superni_other.jsonl.gz"
"""Texts of other tasks: {text, source}, JSON Lines, gzip."""
ERROR_LINES = 20
"""Lines of a failed process's output that its error quotes: the end of its traceback."""


class MeasurementError(StreamlearnError):
    """A process that measures failed; run it again once the cause, which the message quotes, is gone."""


class OutOfTimeError(MeasurementError):
    """A process was still running when its time was up, and was killed; give it more time."""


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the benchmark's docstring as its help, and `--json`."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return options


def numeric(least: Number, most: Number) -> Callable[[str], Number]:
    """Return the `type` of an option: a number of the bounds' type between them."""
    parse = number(least, most)

    def parsed(text: str) -> Number:
        try:
            return parse(text)
        except typer.BadParameter as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


natural, positive, positive_float = numeric(0, MAX_NUMBER), numeric(1, MAX_NUMBER), numeric(1e-3, 1e9)


def command(main: Callable[[], None]) -> None:
    """Run a benchmark; an expected error ends it with its message and its exit code."""
    configure_logging("error")
    try:
        main()
    except StreamlearnError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def grid(rows: Mapping[str, Mapping[str, Any]], columns: Iterable[str] | Mapping[str, str], first: str = "") -> Table:
    """Return a table with a row for each entry of `rows`; `columns` are its keys, or its keys and their headings."""
    headings = columns if isinstance(columns, Mapping) else {name: name.replace("_", " ") for name in columns}
    table = Table(first, *headings.values(), box=None, pad_edge=False)
    for name, row in rows.items():
        table.add_row(escape(name), *(escape(_cell(row.get(key))) for key in headings))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "-" if value is None else f"{value}"


def show(result: Mapping[str, Any], *tables: RenderableType, as_json: bool, width: int | None = None) -> None:
    """Print a result as JSON, or as the given tables."""
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
        return
    console = Console(width=width, highlight=False)
    for table in tables:
        console.print(table)


def in_own_process(
    module: str, options: Mapping[str, Any], *, threads: int | None = None, timeout_s: float | None = None
) -> dict[str, Any]:
    """Run `python -m MODULE OPTIONS`, options as JSON, and return the JSON object on the last line that it prints.

    The peak memory of one measurement is then not that of another, and a crash ends no other.

    Raises:
        MeasurementError: the process failed.
        OutOfTimeError: it did not end in time.
    """
    environment = os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": f"{threads}"}
    command = [sys.executable, "-m", *module.split(), orjson.dumps(options).decode()]
    if timeout_s is not None and timeout_s <= 0:
        raise OutOfTimeError(f"{module}: no time was left")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise OutOfTimeError(f"{module}: not done after {error.timeout:.0f} s") from error
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
