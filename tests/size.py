"""The size of a checkout, as a table: lines, files, loaded modules, tests and documentation.

    python -m tests.size [FOLDER] [--fast]        (also `make size`)

FOLDER is another checkout, this one by default. Lines are those of `wc -l`. Counted are

- product: Python of `streamlearn/` and `connectors/`; `streamlearn/bench/`, where the benchmarks once were, is apart;
- own modules: those of `streamlearn` and `connectors` in `sys.modules` at the end of a real `streamlearn run` of
  `configs/quickstart.yaml` on four records, with HTTP on a free port, in its own process;
- tests: Python of `tests/`, and the items that pytest collects with the options of `pyproject.toml`;
- documentation: the pages `docs/*.md` and `docs/*/README.md`, and all of `docs/` in megabytes.

`--fast` leaves out what starts a process: the modules and the items.
"""

import argparse
import gzip
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
RUN = """
import atexit, sys
own = ("streamlearn", "connectors")
atexit.register(lambda: print("own modules", sum(name.partition(".")[0] in own for name in sys.modules)))
try:
    from streamlearn.cli.main import main
except ImportError:  # the layout before 0.2.0
    from streamlearn.commands.cli import main
sys.argv = ["streamlearn", "run", "--config", sys.argv[1]]
main()
"""
RECORDS = 4


def lines(files: Iterable[Path]) -> int:
    """Return the lines of the files together."""
    return sum(file.read_bytes().count(b"\n") for file in files)


def python(*folders: Path) -> list[Path]:
    """Return the Python files below the folders."""
    return [file for folder in folders for file in folder.rglob("*.py")]


def loaded_modules(root: Path) -> int | None:
    """Return the own modules that a run loads; None if it failed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STREAMLEARN")}
    with tempfile.TemporaryDirectory() as name:
        stream = Path(name) / "stream.jsonl"
        with gzip.open(root / "configs/sample/superni.train.jsonl.gz") as sample:
            stream.write_bytes(b"".join(islice(sample, RECORDS)))
        environment |= {
            "PYTHONPATH": str(root),
            "STREAMLEARN_STATE": str(Path(name) / "state"),
            "STREAMLEARN_SOURCE__JSONL__PATH": str(stream),
            "STREAMLEARN_SERVE__PORT": "0",
        }
        command = [sys.executable, "-c", RUN, str(root / "configs/quickstart.yaml")]
        done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"own modules (\d+)", done.stdout)
    return int(found[1]) if found and done.returncode == 0 else None


def collected_items(root: Path) -> int | None:
    """Return the number of tests; None if they cannot be collected."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"^(\d+)(?:/\d+)? tests? collected", done.stdout, re.MULTILINE)
    return int(found[1]) if found else None


def measure(root: Path, *, fast: bool = False) -> dict[str, str]:
    """Return the rows of the table."""
    old_bench = root / "streamlearn/bench"
    product = [file for file in python(root / "streamlearn", root / "connectors") if old_bench not in file.parents]
    benchmarks = python(root / "benchmarks", old_bench)
    everything = [*product, *python(old_bench)]
    sizes = [lines([file]) for file in everything]
    static = [file for file in (root / "streamlearn").rglob("static/**/*") if file.suffix in (".js", ".css", ".html")]
    tests = python(root / "tests")
    pages = [*(root / "docs").glob("*.md"), *(root / "docs").glob("*/README.md")]
    megabytes = sum(file.stat().st_size for file in (root / "docs").rglob("*") if file.is_file()) / 1e6
    rows = {
        "streamlearn/ and connectors/, Python": f"{sum(sizes):,} lines, {len(everything)} files",
        "  of them benchmarks": f"{lines(python(old_bench)):,} lines, {len(python(old_bench))} files",
        "median file": f"{median(sizes):.0f} lines; {sum(size > 600 for size in sizes)} files over 600",
        "benchmarks/": f"{lines(benchmarks):,} lines, {len(benchmarks)} files",
        "static page": f"{lines(static):,} lines, {len(static)} files",
        "tests": f"{lines(tests):,} lines, {len(tests)} files",
        "documentation": f"{len(pages)} pages, {lines(pages):,} lines; docs/ {megabytes:.1f} MB",
        "README.md": f"{lines([root / 'README.md'])} lines",
    }
    if not fast:
        rows["own modules loaded by `streamlearn run`"] = str(loaded_modules(root) or "the run failed")
        rows["test items"] = str(collected_items(root) or "not collected")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT, help="root of a checkout")
    parser.add_argument("--fast", action="store_true", help="leave out modules and test items")
    given = parser.parse_args()
    print("| | |\n|---|---|")  # noqa: T201
    for name, value in measure(given.folder.resolve(), fast=given.fast).items():
        print(f"| {name} | {value} |")  # noqa: T201


if __name__ == "__main__":
    main()
