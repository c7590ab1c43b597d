"""A suite's summary as tables: what every method scored, and what leaving a mechanism out changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamlearn.bench.learn.methods import METHODS

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
DIFFERENCES: Mapping[str, tuple[str, int]] = {
    "AP": ("d AP", 3),
    "AF": ("d AF", 3),
    "ZST": ("d ZST", 3),
    "prequential_loss": ("d preq.", 2),
}
"""Figure -> heading of its difference, decimals."""


@dataclass(frozen=True)
class Table:
    """Headings and cells."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[str] = frozenset()
    """Rows, by their first cell, that were told nothing."""


def table_of_methods(summary: Summary) -> Table:
    """Mean ± standard deviation, with n; columns that nobody fills are left out."""
    methods: Mapping[str, Mapping[str, Any]] = summary["methods"]
    names = [name for name in COLUMNS if any(figures[name] is not None for figures in methods.values())]
    rows = [
        [method, *(cell(figures[name], COLUMNS[name][1]) for name in names), f"{figures['AP']['seeds']}"]
        for method, figures in methods.items()
    ]
    free = frozenset(method for method in methods if method in METHODS and METHODS[method].baseline is None)
    return Table(["", *(COLUMNS[name][0] for name in names), "n"], rows, free)


def table_of_ablations(summary: Summary) -> Table | None:
    """AP and AF, and their differences from the method on the same records; None where nothing was left out."""
    ablations: Mapping[str, Mapping[str, Any]] = summary["ablations"]
    if not ablations:
        return None
    rows = [
        [name, figures["of"], cell(figures["AP"], 3), cell(figures["AF"], 3)]
        + [cell(figures["differences"][each], places, sign=True) for each, (_, places) in DIFFERENCES.items()]
        + [f"{figures['AP']['seeds']}"]
        for name, figures in ablations.items()
    ]
    headings = ["left out or changed", "of", "AP", "AF", *(heading for heading, _ in DIFFERENCES.values()), "n"]
    return Table(headings, rows)


def cell(figure: Mapping[str, Any] | None, decimals: int, *, sign: bool = False) -> str:
    """One figure for people; `sign` shows a plus too."""
    if figure is None:
        return "-"
    spread = "" if figure["sd"] is None else f" ± {figure['sd']:.{decimals}f}"
    return f"{figure['mean']:{'+' if sign else ''}.{decimals}f}{spread}"


def about(summary: Summary) -> str:
    """One line on what was run."""
    setting = summary["setting"]
    records = sum(stretch["records"] for stretch in setting["stretches"])
    return (
        f"{len(setting['stretches'])} stretches, {records} records, {sum(setting['tests'].values())} test records; "
        f"{', '.join(setting['dtypes'])}, torch {setting['torch']}, commit {', '.join(setting['commits'])}."
    )


def markdown(summary: Summary) -> str:
    """A suite's tables, with what their columns mean."""
    methods, ablations = table_of_methods(summary), table_of_ablations(summary)
    lines = [f"# {summary['suite']}", "", about(summary), "", *_lines(methods), ""]
    lines += [f"- {heading}: {text}" for heading, _, text in COLUMNS.values() if heading in methods.headings]
    lines += ["- n: seeds; ± is their standard deviation"]
    if ablations is not None:
        lines += [
            "",
            "## What each mechanism is worth",
            "",
            *_lines(ablations),
            "",
            "- of: the method that was changed",
        ]
        lines += ["- d: less that method's run of the same seed, on the same records"]
    return "\n".join(lines) + "\n"


def _lines(table: Table) -> list[str]:
    rows = ["| " + " | ".join(row) + " |" for row in table.rows]
    return ["| " + " | ".join(table.headings) + " |", "|" + "---|" * len(table.headings), *rows]
