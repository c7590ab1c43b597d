"""Tables of a suite's summary: headings, cells and the notes below them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.learn.run_files import FROZEN

Summary = Mapping[str, Any]
Json = Mapping[str, Any]


class ScoreColumn(NamedTuple):
    """A column with a figure of each method."""

    heading: str
    decimals: int
    meaning: str


ANSWERS: Mapping[str, ScoreColumn] = {
    "AP": ScoreColumn("AP", 3, "score of free answers at the end, mean over tasks"),
    "LA": ScoreColumn("LA", 3, "learning accuracy: score right after a task's last segment, mean over tasks"),
    "AF": ScoreColumn("AF", 3, "average forgetting: drop since a task's last segment; a gain counts as no drop"),
    "BWT": ScoreColumn("BWT", 3, "backward transfer: change since a task's last segment; positive for a gain"),
    "ZST": ScoreColumn("ZST", 3, "zero-shot transfer: score at the end on tasks that were never trained on"),
}
COSTS: Mapping[str, ScoreColumn] = {
    "token_AP": ScoreColumn("token AP", 3, "teacher-forced token accuracy at the end, mean over tasks"),
    "token_loss": ScoreColumn("token loss", 2, "teacher-forced loss at the end, nats per answer token"),
    "FWT": ScoreColumn("FWT", 3, "forward transfer: token accuracy before a task's first record, less that of frozen"),
    "prequential_loss": ScoreColumn(
        "preq.", 2, "prequential loss, of each record before training on it, nats per token"
    ),
    "first_50_loss": ScoreColumn("first 50", 2, "prequential loss over the first 50 records of each segment"),
    "boundaries_found": ScoreColumn("found", 1, "true boundaries detected within 64 records, before the next one"),
    "false_shifts": ScoreColumn("false", 1, "shifts declared without a boundary"),
    "returns_declared": ScoreColumn("returns", 1, "shifts declared to be the return of a known regime"),
    "activated_parameters": ScoreColumn("active", 0, "trained parameters that one token activates"),
    "stored_parameters": ScoreColumn("stored", 0, "trained parameters that are kept"),
    "tokens_per_s": ScoreColumn("tokens/s", 0, "training throughput, without evaluation"),
    "peak_memory_mib": ScoreColumn("MiB", 0, "peak memory of the process"),
}
DIFFERENCES: Mapping[str, str] = {figure: f"d {figure}" for figure in ("AP", "BWT", "LA", "ZST")}
INTERVAL = "95 %: interval from a paired bootstrap over test records; it does not cover other training seeds"
SPREAD = "±: standard deviation over seeds; n: number of seeds"
ARROW = "a → b: score right after the task's last segment, and at the end"


@dataclass(frozen=True)
class TextTable:
    """A title, headings, cells, and notes that explain them."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    bold: frozenset[str] = frozenset()
    """First cells of the rows that stand out."""


def tables(summary: Summary) -> list[TextTable]:
    """Build all tables of a suite."""
    found = [answers_table(summary), differences_table(summary), costs_table(summary), tasks_table(summary)]
    return [*found, ablations_table(summary)] if summary["ablations"] else found


def answers_table(summary: Summary) -> TextTable:
    """Build the table of the scores of free answers."""
    methods: Mapping[str, Json] = summary["methods"]
    ceiling, undefined = summary["skill_scale"]["ceiling"], summary["skill_scale"]["undefined"]
    names = _known(ANSWERS, methods.values())
    has_gain = any(row["zero_shot_gain"] for row in methods.values())
    headings = ["method", "AP", "AP, 95 %", "skill", *(ANSWERS[name].heading for name in names[1:])]
    rows = []
    for name, row in methods.items():
        cells = [cell(row["figures"][figure], ANSWERS[figure].decimals) for figure in names]
        skill = "-" if row["skill"] is None else f"{row['skill']:.2f}"
        gain = [estimate(row["zero_shot_gain"])] if has_gain else []
        label = f"{name} (ceiling)" if name == ceiling else name
        first = [label, cells[0], interval(row["intervals"]["AP"]), skill]
        rows.append([*first, *cells[1:], *gain, f"{len(row['seeds'])}"])
    notes = [f"{ANSWERS[name].heading}: {ANSWERS[name].meaning}" for name in names]
    notes.insert(1, "skill: (AP - AP of blind) / (AP of the ceiling - AP of blind)")
    if undefined:
        notes.insert(2, f"skill is undefined (-): {undefined}")
    if has_gain:
        notes.append(f"over {FROZEN}: ZST less that of the backbone without training, with its 95 % interval")
    headings = [*headings, *([f"over {FROZEN}"] if has_gain else []), "n"]
    return TextTable("Answers", headings, rows, [*notes, INTERVAL, SPREAD], frozenset({"streamlearn"}))


def differences_table(summary: Summary) -> TextTable:
    """Build the table of differences from the default method."""
    rows = [
        [name, *(estimate(row["differences"][figure]) for figure in DIFFERENCES), _pairs(row)]
        for name, row in summary["methods"].items()
        if any(row["differences"].values())
    ]
    notes = ["d: figure of the method less that of streamlearn, on the same seeds and test records", INTERVAL]
    notes.append("n: number of seeds that both have")
    return TextTable("Differences from streamlearn", ["method", *DIFFERENCES.values(), "n"], rows, notes)


def costs_table(summary: Summary) -> TextTable:
    """Build the table of token figures, detection, parameters and costs."""
    methods: Mapping[str, Json] = {**summary["methods"], **summary["ablations"]}
    names = _known(COSTS, methods.values())
    rows = [
        [name, *(cell(row["figures"][figure], COSTS[figure].decimals) for figure in names), row["commit"][:8]]
        for name, row in methods.items()
    ]
    notes = [f"{COSTS[name].heading}: {COSTS[name].meaning}" for name in names]
    headings = ["method", *(COSTS[name].heading for name in names), "commit"]
    return TextTable("Tokens and costs", headings, rows, [*notes, SPREAD], frozenset({"streamlearn"}))


def tasks_table(summary: Summary) -> TextTable:
    """Build the table of scores by task."""
    tasks: Mapping[str, Json] = summary["tasks"]
    shown = list(next(iter(tasks.values()))["methods"])
    ceiling = summary["skill_scale"]["ceiling"]
    rows = [
        [
            f"{task} (unseen)" if row["unseen"] else task,
            row["metric"].replace("_", " "),
            f"{row['records']}",
            *(_task_scores(row["methods"][name]) for name in shown),
        ]
        for task, row in tasks.items()
    ]
    headings = ["task", "metric", "records", *(f"{name} (ceiling)" if name == ceiling else name for name in shown)]
    notes = [ARROW, "[ ]: 95 % interval of the score at the end", "records: number of scored records"]
    return TextTable("By task", headings, rows, notes)


def ablations_table(summary: Summary) -> TextTable:
    """Build the table of ablations: their differences from the method that they change."""
    rows = [
        [name, row["of"], cell(row["figures"]["AP"], 3), cell(row["figures"]["AF"], 3)]
        + [estimate(row["differences"][figure]) for figure in DIFFERENCES]
        + [_pairs(row)]
        for name, row in summary["ablations"].items()
    ]
    headings = ["ablation", "of", "AP", "AF", *DIFFERENCES.values(), "n"]
    notes = [
        "of: the method that the ablation changes; d: figure of the ablation less that of this method",
        INTERVAL,
        "n: number of seeds that both have",
    ]
    return TextTable("Ablations", headings, rows, notes)


def cell(figure: Json | None, decimals: int) -> str:
    """Format the mean of a figure, and its spread where there are several seeds."""
    if figure is None:
        return "-"
    spread = "" if not figure["sd"] else f" ± {figure['sd']:,.{decimals}f}"
    return f"{figure['mean']:,.{decimals}f}{spread}"


def interval(found: Json | None) -> str:
    """Format an interval."""
    return "-" if found is None else f"{found['low']:.3f} to {found['high']:.3f}"


def estimate(found: Json | None) -> str:
    """Format a difference and its interval."""
    return "-" if found is None else f"{found['value']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def _known(columns: Mapping[str, ScoreColumn], rows: Any) -> list[str]:
    """Columns that have a value in some row."""
    rows = list(rows)
    return [name for name in columns if any(row["figures"][name] is not None for row in rows)]


def _pairs(row: Json) -> str:
    found = row["differences"]["AP"]
    return "-" if found is None else f"{found['seeds']}"


def _task_scores(scores: Json) -> str:
    """Score after a task's last segment, where there is one, and at the end with its interval."""
    after = "" if scores["after"] is None else f"{scores['after']:.2f} → "
    return f"{after}{scores['end']:.2f} [{scores['low']:.2f}, {scores['high']:.2f}]"
