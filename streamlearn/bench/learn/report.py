"""Report on a folder of runs: tables, plots and one HTML page."""

import html
from collections.abc import Sequence
from pathlib import Path

import orjson
from rich.console import Console

from streamlearn.bench.learn.summary import read_runs, summarise
from streamlearn.bench.learn.tables import (
    ABLATIONS_TITLE,
    COLUMNS,
    Summary,
    TextTable,
    about,
    markdown,
    table_of_ablations,
    table_of_methods,
)
from streamlearn.errors import UsageError


def report(folder: Path, out: Path, console: Console) -> None:
    """Write SUITE.json, SUITE.md and the plots of every suite, and index.html for all of them.

    Raises:
        UsageError: there are no runs, or matplotlib is not installed.
    """
    try:
        from streamlearn.bench.learn.plots import draw  # noqa: PLC0415 - matplotlib is an extra
    except ImportError as error:
        raise UsageError("bench report needs matplotlib; pip install 'streamlearn[bench]'") from error
    suites = read_runs(folder)
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for suite, runs in suites.items():
        summary = summarise(runs)
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        (out / f"{suite}.json").write_bytes(text)
        (out / f"{suite}.md").write_text(markdown(summary), encoding="utf-8")
        parts.append(section(summary, draw(runs, out)))
        console.print(f"{suite}: {len(runs)} runs of {len({run['method'] for run in runs})} methods", highlight=False)
    (out / "index.html").write_text(page(parts), encoding="utf-8")
    console.print(f"{out / 'index.html'}", highlight=False, soft_wrap=True)


def section(summary: Summary, plots: Sequence[Path]) -> str:
    """Format a suite's part of the page."""
    title = html.escape(summary["suite"])
    table = table_of_ablations(summary)
    ablations = "" if table is None else f"<h3>{ABLATIONS_TITLE}</h3>{_table(table)}"
    images = "".join(f'<img src="{html.escape(file.name)}" alt="{html.escape(file.stem)}">' for file in plots)
    return (
        f'<section id="{title}"><h2>{title}</h2><p>{html.escape(about(summary))}</p>'
        f"{_table(table_of_methods(summary))}{ablations}{images}</section>"
    )


def page(parts: Sequence[str]) -> str:
    """Format the page; it has no scripts and loads nothing from other hosts."""
    meanings = "".join(
        f"<dt>{html.escape(column.heading)}</dt><dd>{html.escape(column.meaning)}</dd>" for column in COLUMNS.values()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<title>streamlearn: forgetting compared across methods</title>"
        f"<style>{_STYLE}</style></head><body><h1>Forgetting compared across methods</h1>"
        "<p>Mean ± standard deviation over seeds (n is their number). Methods in bold are given no task boundaries; "
        "all other methods are told where each task begins and ends. d is the difference from the run with the same "
        "seed of the method that the ablation changes.</p>"
        f"{''.join(parts)}<dl>{meanings}</dl></body></html>\n"
    )


def _table(table: TextTable) -> str:
    head = "".join(f'<th title="{html.escape(_meaning(name))}">{html.escape(name)}</th>' for name in table.headings)
    body = "".join(
        ('<tr class="free">' if row[0] in table.bold else "<tr>")
        + "".join(f"<td>{html.escape(text)}</td>" for text in row)
        + "</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _meaning(heading: str) -> str:
    return next((column.meaning for column in COLUMNS.values() if column.heading == heading), "")


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px;margin:1rem 0}"
    "table{display:block;overflow-x:auto}"
    "th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid #ddd}"
    "th:first-child,td:first-child{text-align:left}.free td{font-weight:600}"
    "img{max-width:100%;display:block;margin:1rem 0}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}"
    "dt{font-weight:600}dd{margin:0}"
)
