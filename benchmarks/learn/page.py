"""The HTML page of all suites. It has no scripts and loads nothing from other hosts."""

import html
from collections.abc import Sequence

from benchmarks.learn.markdown import about
from benchmarks.learn.plots.plot_file import PlotFile
from benchmarks.learn.tables import Summary, TextTable, tables
from benchmarks.learn.what_holds import TITLE, cases_table, sentences

HEADING = "Forgetting compared across methods"


def page(suites: Sequence[tuple[Summary, Sequence[PlotFile]]]) -> str:
    """Format the page: a list of the suites, and a section for each."""
    names = [html.escape(summary["suite"]) for summary, _ in suites]
    links = "".join(f'<li><a href="#{name}">{name}</a></li>' for name in names)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>streamlearn: {HEADING.lower()}</title>"
        f'<style>{_STYLE}</style></head><body><header><h1>{HEADING}</h1><nav aria-label="Suites"><ul>{links}</ul></nav>'
        f"</header><main>{''.join(_section(*each) for each in suites)}</main></body></html>\n"
    )


def _section(summary: Summary, plots: Sequence[PlotFile]) -> str:
    name = html.escape(summary["suite"])
    cases = cases_table(summary)
    holds = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences(summary))
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{name}</h2><p>{html.escape(about(summary))}</p>'
        f"<h3>{TITLE}</h3><ul>{holds}</ul>{'' if cases is None else _table(cases)}"
        f"{''.join(map(_figure, plots))}{''.join(map(_table, tables(summary)))}</section>"
    )


def _figure(plot: PlotFile) -> str:
    return (
        f'<figure><img src="{html.escape(plot.file.name)}" alt="{html.escape(plot.alt)}" loading="lazy">'
        f"<figcaption>{html.escape(plot.title)}</figcaption></figure>"
    )


def _table(table: TextTable) -> str:
    title = html.escape(table.title)
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in table.headings)
    body = "".join(_row(row, bold=row[0] in table.bold) for row in table.rows)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return (
        f'<div class="table" role="region" aria-label="{title}" tabindex="0"><table><caption>{title}</caption>'
        f'<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div><ul class="notes">{notes}</ul>'
    )


def _row(cells: Sequence[str], *, bold: bool) -> str:
    opening = '<tr class="bold">' if bold else "<tr>"
    rest = "".join(f"<td>{html.escape(text)}</td>" for text in cells[1:])
    return f'{opening}<th scope="row">{html.escape(cells[0])}</th>{rest}</tr>'


_STYLE = (
    ":root{color-scheme:light dark;--text:#222;--page:#fff;--line:#d0d0d0;--faint:#555;--link:#0b5cad}"
    "@media(prefers-color-scheme:dark){:root{--text:#e6e6e6;--page:#161616;--line:#444;--faint:#aaa;--link:#8ab4f8}}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:1200px;margin:1rem auto;padding:0 1rem;color:var(--text);"
    "background:var(--page)}"
    "a{color:var(--link)}nav ul{display:flex;flex-wrap:wrap;gap:.3rem 1rem;list-style:none;padding:0}"
    "section{border-top:1px solid var(--line);margin-top:2rem}"
    ".table{overflow-x:auto;margin-top:1.5rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}"
    "caption{text-align:left;font-weight:600;font-size:17px;padding:.3rem 0}"
    "th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}"
    "th:first-child{text-align:left;white-space:normal;min-width:8rem}"
    "tbody th{font-weight:400}.bold>*{font-weight:600!important}"
    ".notes{font-size:14px;color:var(--faint);margin:.5rem 0 0;padding-left:1.2rem}"
    "figure{margin:1.5rem 0}img{max-width:100%;height:auto;background:#fff}"
    "figcaption{font-size:14px;color:var(--faint)}"
)
