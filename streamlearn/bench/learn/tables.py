"""Tables of a suite's summary: the figures of every method, and the effect of every ablation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamlearn.bench.learn.methods import METHODS

Summary = Mapping[str, Any]


class Column(NamedTuple):
    """A column of the table of methods."""

    heading: str
    decimals: int
    meaning: str


COLUMNS: Mapping[str, Column] = {
    "AP": Column("AP", 3, "final token accuracy, mean over tasks"),
    "AF": Column("AF", 3, "average forgetting: drop from a task's best accuracy to its final one"),
    "BWT": Column("BWT", 3, "backward transfer: change since the end of a task; positive when later tasks helped"),
    "ZST": Column("ZST", 3, "zero-shot transfer: final token accuracy on tasks that were never trained on"),
    "FWT": Column("FWT", 3, "forward transfer: gain over the frozen backbone just before a task's first record"),
    "exact_match": Column("EM", 2, "exact match of generated answers, on tasks with at most twelve different answers"),
    "rouge_l": Column("ROUGE-L", 2, "text overlap of generated answers, on all other tasks"),
    "prequential_loss": Column("preq.", 2, "prequential loss: of each record before training on it, nats per token"),
    "boundaries_found": Column("found", 1, "true boundaries detected within 64 records"),
    "false_shifts": Column("false", 1, "shifts declared without a boundary"),
    "n_eff": Column("N_eff", 1, "effective number of token kinds per expert (MH-MoE eq. 9), 1 to 16"),
    "tokens_per_s": Column("tokens/s", 0, "training throughput, without evaluation; measured on a shared machine"),
    "peak_memory_mib": Column("MiB", 0, "peak memory of the process"),
}
"""Figure -> its column."""
DIFFERENCES: Mapping[str, tuple[str, int]] = {
    "AP": ("d AP", 3),
    "AF": ("d AF", 3),
    "ZST": ("d ZST", 3),
    "prequential_loss": ("d preq.", 2),
}
"""Figure -> heading and decimals of its difference."""
ABLATIONS_TITLE = "Ablations"


@dataclass(frozen=True)
class TextTable:
    """Headings and cells."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[str] = frozenset()
    """First cells of the rows of methods that are given no task boundaries."""


def table_of_methods(summary: Summary) -> TextTable:
    """Build the table of means and standard deviations; columns without any value are left out."""
    methods: Mapping[str, Mapping[str, Any]] = summary["methods"]
    names = [name for name in COLUMNS if any(figures[name] is not None for figures in methods.values())]
    rows = [
        [method, *(cell(figures[name], COLUMNS[name].decimals) for name in names), f"{figures['AP']['seeds']}"]
        for method, figures in methods.items()
    ]
    bold = frozenset(method for method in methods if method in METHODS and METHODS[method].baseline is None)
    return TextTable(["", *(COLUMNS[name].heading for name in names), "n"], rows, bold)


def table_of_ablations(summary: Summary) -> TextTable | None:
    """Build the table of AP, AF and the differences from the unchanged method; None without ablations."""
    ablations: Mapping[str, Mapping[str, Any]] = summary["ablations"]
    if not ablations:
        return None
    rows = [
        [name, figures["of"], cell(figures["AP"], 3), cell(figures["AF"], 3)]
        + [cell(figures["differences"][each], places, sign=True) for each, (_, places) in DIFFERENCES.items()]
        + [f"{figures['AP']['seeds']}"]
        for name, figures in ablations.items()
    ]
    headings = ["ablation", "of", "AP", "AF", *(heading for heading, _ in DIFFERENCES.values()), "n"]
    return TextTable(headings, rows)


def cell(figure: Mapping[str, Any] | None, decimals: int, *, sign: bool = False) -> str:
    """Format one figure; `sign` also prints a plus."""
    if figure is None:
        return "-"
    spread = "" if figure["sd"] is None else f" ± {figure['sd']:.{decimals}f}"
    return f"{figure['mean']:{'+' if sign else ''}.{decimals}f}{spread}"


def about(summary: Summary) -> str:
    """Describe the runs in one line."""
    setting = summary["setting"]
    records = sum(segment["records"] for segment in setting["stretches"])
    return (
        f"{len(setting['stretches'])} segments, {records} records, {sum(setting['tests'].values())} test records; "
        f"{', '.join(setting['dtypes'])}, torch {setting['torch']}, commit {', '.join(setting['commits'])}."
    )


def markdown(summary: Summary) -> str:
    """Format a suite's tables and the meaning of their columns."""
    methods, ablations = table_of_methods(summary), table_of_ablations(summary)
    lines = [f"# {summary['suite']}", "", about(summary), "", *_lines(methods), ""]
    columns = [column for column in COLUMNS.values() if column.heading in methods.headings]
    lines += [f"- {column.heading}: {column.meaning}" for column in columns]
    lines += ["- n: number of seeds; ± is the standard deviation over them"]
    if ablations is not None:
        lines += ["", f"## {ABLATIONS_TITLE}", "", *_lines(ablations), ""]
        lines += ["- of: the method that the ablation changes"]
        lines += ["- d: difference from that method's run with the same seed, on the same records"]
    return "\n".join(lines) + "\n"


def _lines(table: TextTable) -> list[str]:
    rows = ["| " + " | ".join(row) + " |" for row in table.rows]
    return ["| " + " | ".join(table.headings) + " |", "|" + "---|" * len(table.headings), *rows]
