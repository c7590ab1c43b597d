"""The answers change and the inputs do not: a classification task whose labels are exchanged halfway.

The bundled backbone learns next to nothing about sentiment from 500 records seen once (0.53 right where a coin gets
0.5), and an exchange of guesses shows nothing. So `DISTINCT` records come `PASSES` times, in another order each time,
and then `PASSES_AFTER` times with the labels exchanged: what was learned by heart is wrong. Accuracy is prequential
(before a record is learned), averaged over the seeds, in a window as long as a pass, in which each record stands once.

- declared_after: records between the exchange and the shift of the answers that is declared, one a seed; null: none
- false_alarms: shifts of the answers declared before the exchange, or again after it, all seeds
- new_regimes: regimes declared after it, all seeds; the inputs are the same, so each is a mistake
- level: accuracy in the last pass before the exchange
- recovered_after: records until the accuracy is back at 90 % of the level; null when it never is
- lora_level, lora_recovered_after: the same for preset `lora` on the same records; ratio is the quotient
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson
from rich.table import Table

from streamlearn.adaptation.adaptation import ShiftReport
from streamlearn.bench.learn.arms import settings_of
from streamlearn.bench.superni import read_task
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Step
from streamlearn.runtime.components import Components
from streamlearn.runtime.daemon import Daemon
from streamlearn.snapshot.snapshot import SnapshotInfo
from streamlearn.status.board import Board, Clock
from streamlearn.status.status import Phase, Status
from streamlearn.stream.batch import Batch

TASKS = ("task363", "task875", "task1687")
DISTINCT, PASSES, PASSES_AFTER = 150, 6, 10
BACK = 0.9


class _Notes:
    """What was right, record by record, and what was declared."""

    def __init__(self) -> None:
        self.correct: list[bool] = []
        self.entries: list[ShiftReport] = []

    def on_start(self, status: Status) -> None:
        """Nothing."""

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Nothing."""

    def on_shift(self, entry: ShiftReport) -> None:
        """Note it."""
        self.entries.append(entry)

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Note the records, in order."""
        del batch, status
        self.correct += step.record_correct


def exchanged(folder: Path, task: str, seed: int) -> tuple[list[dict[str, Any]], int]:
    """The stream, and the index of the first record whose label was replaced by the next."""
    rng = random.Random(f"{seed} {task}")
    rows = list(read_task(folder, task, "train"))
    rng.shuffle(rows)
    labels = sorted({row["completion"] for row in rows})
    after = dict(zip(labels, [*labels[1:], labels[0]], strict=True))
    passes = [rng.sample(rows[:DISTINCT], DISTINCT) for _ in range(PASSES + PASSES_AFTER)]
    first = [row for each in passes[:PASSES] for row in each]
    second = [{**row, "completion": after[row["completion"]]} for each in passes[PASSES:] for row in each]
    return [*first, *second], len(first)


def run(rows: Sequence[dict[str, Any]], arm: str, seed: int) -> _Notes:
    """The stream through the daemon, nothing kept out."""
    notes = _Notes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stream.jsonl"
        file.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
        nothing_kept_out = {"holdout.every_records": 0}
        state = Path(folder) / "state"
        components = Components(settings_of(arm, seed=seed, state=state, stream=file, shared=nothing_kept_out))
        Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1), observer=notes).run()
        components.close()
    return notes


def recovery(accuracy: Sequence[float], half: int) -> tuple[float, int | None]:
    """The level before the exchange, and how many records it took to come back to most of it.

    `accuracy` is each record's, over the seeds; `half` the index of the first with another label.
    """
    level = fmean(accuracy[half - DISTINCT : half])
    total = sum(accuracy[half : half + DISTINCT])
    for end in range(half + DISTINCT, len(accuracy) + 1):
        if total >= BACK * level * DISTINCT - 1e-9:
            return level, end - half
        total += accuracy[end] - accuracy[end - DISTINCT] if end < len(accuracy) else 0.0
    return level, None


def measure_all(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Every task of `TASKS` that the folder holds."""
    present = [task for task in TASKS if any(folder.glob(f"{task}*.train.jsonl.gz"))]
    return {task: measure(folder, task, seeds) for task in present}


def measure(folder: Path, task: str, seeds: Sequence[int]) -> dict[str, Any]:
    """One task."""
    streams = [exchanged(folder, task, seed) for seed in seeds]
    half = streams[0][1]
    found, plain = (
        [run(rows, arm, seed) for seed, (rows, _) in zip(seeds, streams, strict=True)]
        for arm in ("streamlearn", "lora")
    )
    (level, back), (plain_level, plain_back) = (recovery(_mean_over_seeds(notes), half) for notes in (found, plain))
    answers = [[e.shift.declared_at for e in notes.entries if e.shift.kind == "answers"] for notes in found]
    after = [next((at - half for at in each if at > half), None) for each in answers]
    inputs = [entry.shift.declared_at for notes in found for entry in notes.entries if entry.shift.kind == "inputs"]
    return {
        "declared_after": after,
        "false_alarms": sum(map(len, answers)) - sum(each is not None for each in after),
        "new_regimes": sum(at > half for at in inputs),
        "level": round(level, 3),
        "recovered_after": back,
        "lora_level": round(plain_level, 3),
        "lora_recovered_after": plain_back,
        "ratio": None if back is None or plain_back is None else round(back / plain_back, 3),
    }


def _mean_over_seeds(runs: Sequence[_Notes]) -> list[float]:
    return [fmean(right) for right in zip(*(notes.correct for notes in runs), strict=True)]


def table(result: dict[str, dict[str, Any]]) -> Table:
    """The figures for a person, one task a line."""
    names = tuple(next(iter(result.values()), {}))
    shown = Table("answers exchanged", *(name.replace("_", " ") for name in names), box=None, pad_edge=False)
    for task, row in result.items():
        shown.add_row(task, *(_cell(row[name]) for name in names))
    return shown


def _cell(value: float | list[float | None] | None) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "-" if value is None else f"{value:.2f}".removesuffix(".00")
