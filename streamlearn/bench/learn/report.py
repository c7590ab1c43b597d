"""The runs of a folder as tables, pictures and one page."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from streamlearn.bench.learn.methods import METHODS
from streamlearn.bench.learn.summary import read_runs, summarise
from streamlearn.errors import UsageError

Summary = Mapping[str, Any]

COLUMNS: Mapping[str, tuple[str, int, str]] = {
    "AP": ("AP", 3, "token accuracy at the end, mean over tasks"),
    "AF": ("AF", 3, "mean drop from a task's best"),
    "BWT": ("BWT", 3, "change since a task's end; positive: later tasks helped"),
    "ZST": ("ZST", 3, "token accuracy on tasks never trained on"),
    "FWT": ("FWT", 3, "gain over the frozen backbone before a task's first record"),
    "exact_match": ("EM", 2, "exact match, tasks with few different answers"),
    "rouge_l": ("ROUGE-L", 2, "the other tasks"),
    "prequential_loss": ("preq.", 2, "loss before learning, nats per token, whole stream"),
    "boundaries_found": ("found", 1, "boundaries found within 64 records, of those that are there"),
    "false_shifts": ("false", 1, "shifts declared where there was no boundary"),
    "n_eff": ("N_eff", 1, "kinds of tokens that share an expert (MH-MoE eq. 9), 1 to 16"),
    "tokens_per_s": ("tokens/s", 0, "learning alone; on a shared machine"),
    "peak_memory_mib": ("MiB", 0, "peak memory of the process"),
}
"""Figure -> heading, decimals, meaning."""


def report(folder: Path, out: Path, console: Console) -> None:
    """Write SUITE.json, SUITE.md and pictures for every suite, and index.html over all.

    Raises:
        UsageError: there are no runs, or nothing to draw with.
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
        console.print(f"{suite}: {len(runs)} runs of {len(summary['methods'])} methods", highlight=False)
    (out / "index.html").write_text(page(parts), encoding="utf-8")
    console.print(f"{out / 'index.html'}", highlight=False, soft_wrap=True)


def rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: mean ± standard deviation, with n; columns that nobody fills are left out."""
    methods: Mapping[str, Mapping[str, Any]] = summary["methods"]
    names = [name for name in COLUMNS if any(figures[name] is not None for figures in methods.values())]
    cells = [
        [method, *(cell(figures[name], COLUMNS[name][1]) for name in names), f"{figures['AP']['seeds']}"]
        for method, figures in methods.items()
    ]
    return ["", *(COLUMNS[name][0] for name in names), "n"], cells


def cell(figure: Mapping[str, Any] | None, decimals: int) -> str:
    """One figure for people."""
    if figure is None:
        return "-"
    spread = "" if figure["sd"] is None else f" ± {figure['sd']:.{decimals}f}"
    return f"{figure['mean']:.{decimals}f}{spread}"


def markdown(summary: Summary) -> str:
    """A suite's table, with what its columns mean."""
    headings, cells = rows(summary)
    lines = [f"# {summary['suite']}", "", _about(summary), ""]
    lines += ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    meanings = [f"- {heading}: {text}" for heading, _, text in COLUMNS.values() if heading in headings]
    return "\n".join([*lines, "", *meanings, "- n: seeds; ± is their standard deviation", ""])


def section(summary: Summary, pictures: Sequence[Path]) -> str:
    """A suite's part of the page."""
    headings, cells = rows(summary)
    head = "".join(f'<th title="{html.escape(_meaning(name))}">{html.escape(name)}</th>' for name in headings)
    body = "".join(
        f"<tr{_mark(row[0])}>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in cells
    )
    images = "".join(f'<img src="{html.escape(file.name)}" alt="{html.escape(file.stem)}">' for file in pictures)
    title = html.escape(summary["suite"])
    return (
        f'<section id="{title}"><h2>{title}</h2><p>{html.escape(_about(summary))}</p>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{images}</section>"
    )


def page(parts: Sequence[str]) -> str:
    """The whole page; no script, nothing from elsewhere."""
    meanings = "".join(f"<dt>{html.escape(h)}</dt><dd>{html.escape(text)}</dd>" for h, _, text in COLUMNS.values())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>streamlearn: who forgets how much</title>'
        f"<style>{_STYLE}</style></head><body><h1>Who forgets how much</h1>"
        "<p>Mean ± standard deviation over seeds (n). Methods but streamlearn and its ablations were told where tasks "
        f"begin and end.</p>{''.join(parts)}<dl>{meanings}</dl></body></html>\n"
    )


def _about(summary: Summary) -> str:
    setting = summary["setting"]
    records = sum(stretch["records"] for stretch in setting["stretches"])
    return (
        f"{len(setting['stretches'])} stretches, {records} records, {sum(setting['tests'].values())} test records; "
        f"{', '.join(setting['dtypes'])}, torch {setting['torch']}, commit {', '.join(setting['commits'])}."
    )


def _meaning(heading: str) -> str:
    return next((text for name, _, text in COLUMNS.values() if name == heading), "")


def _mark(method: str) -> str:
    """Told nothing: in bold."""
    return ' class="free"' if method not in METHODS or METHODS[method].baseline is None else ""


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
