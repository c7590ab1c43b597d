"""Report on a folder of runs: tables and plots."""

from pathlib import Path

import orjson
from rich.console import Console

from benchmarks.learn.markdown import markdown
from benchmarks.learn.run_files import read_runs
from benchmarks.learn.summary import summarise
from streamlearn.errors import UsageError


def report(folder: Path, out: Path, console: Console) -> None:
    """Write SUITE.json, SUITE.md and the plots of every suite.

    Raises:
        UsageError: there are no runs, they are not comparable, or matplotlib is not installed.
    """
    try:
        from benchmarks.learn.plots.draw import draw  # noqa: PLC0415 - matplotlib is an extra
    except ImportError as error:
        raise UsageError("bench report needs matplotlib; pip install 'streamlearn[bench]'") from error
    suites = read_runs(folder)
    summaries = {suite: summarise(runs) for suite, runs in suites.items()}
    out.mkdir(parents=True, exist_ok=True)
    for suite, summary in summaries.items():
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        (out / f"{suite}.json").write_bytes(text)
        (out / f"{suite}.md").write_text(markdown(summary), encoding="utf-8")
        draw(summary, suites[suite], out)
        methods = len(summary["methods"]) + len(summary["ablations"])
        console.print(f"{suite}: {len(suites[suite])} runs of {methods} methods", highlight=False)
