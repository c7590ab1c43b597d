"""A suite's summary as Markdown."""

from collections.abc import Sequence

from benchmarks.learn.tables import Summary, TextTable, tables


def about(summary: Summary) -> str:
    """Describe the runs in one sentence."""
    setting = summary["setting"]
    scored, unseen = setting["records_scored"], setting["unseen"]
    records = sum(segment["records"] for segment in setting["segments"])
    known = sum(number for task, number in scored.items() if task not in unseen)
    zero_shot = (
        f" and {sum(scored[task] for task in unseen)} of tasks never trained on ({len(unseen)})" if unseen else ""
    )
    return (
        f"{setting['backbone']['model']} with profile {setting['profile']}: {len(setting['segments'])} segments, "
        f"{records} training records; scored on {known} {setting['split']} records of {len(scored) - len(unseen)} tasks"
        f"{zero_shot}. {setting['dtype']} on {setting['device']}, torch {', '.join(setting['torch'])}, "
        f"commit {', '.join(setting['commits'])}."
    )


def markdown(summary: Summary) -> str:
    """Format all tables."""
    lines = [f"# {summary['suite']}", "", about(summary)]
    for table in tables(summary):
        lines += ["", f"## {table.title}", "", *_lines(table), "", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _lines(table: TextTable) -> list[str]:
    rows = [_line(_marked(row, table)) for row in table.rows]
    return [_line(table.headings), "|" + "---|" * len(table.headings), *rows]


def _marked(row: Sequence[str], table: TextTable) -> Sequence[str]:
    return [f"**{row[0]}**", *row[1:]] if row[0] in table.bold else row


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
