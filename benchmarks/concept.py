"""Benchmark of concept drift: a classification task whose labels are exchanged halfway, while the inputs stay the same.

The bundled backbone learns almost nothing about sentiment from 500 records seen once (accuracy 0.53, chance 0.5), and
exchanging the labels of guesses has no effect. Therefore `DISTINCT` records are repeated `PASSES` times, in a new order
each time, and then `PASSES_AFTER` times with exchanged labels, so that memorized answers become wrong. Accuracy is
prequential (measured before a record is learned), averaged over the seeds and over a window of one pass, which holds
each record once. The metrics:

- declared_after: records from the exchange to the declared shift of the answers, per seed; null if there was none
- false_alarms: shifts of the answers before the exchange, or after the first one that follows it, over all seeds
- new_regimes: regimes declared after the exchange, over all seeds; the inputs are the same, so each is a mistake
- level: accuracy in the last pass before the exchange
- recovered_after: records until the accuracy is back at 90 % of the level; null if it never is
- lora_level, lora_recovered_after: the same for preset `lora` on the same records
- ratio: recovered_after / lora_recovered_after
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson
from rich.table import Table

from benchmarks.learn.arms import read_arm
from benchmarks.learn.profile import read_profile
from benchmarks.superni import read_task
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Step
from streamlearn.regimes.regime import ShiftReport
from streamlearn.snapshot.parts import SnapshotInfo
from streamlearn.status import Board, Clock, Phase, Status
from streamlearn.stream.record import Batch

TASKS = ("task363", "task875", "task1687")
DISTINCT, PASSES, PASSES_AFTER = 150, 6, 10
RECOVERED = 0.9
"""Share of the level at which the accuracy counts as recovered."""


class _Recorder:
    """Records the prequential accuracy of every record, and the declared shifts."""

    def __init__(self) -> None:
        self.correct: list[bool] = []
        self.reports: list[ShiftReport] = []

    def declared_at(self, kind: str) -> list[int]:
        """Ordinals at which shifts of one kind were declared."""
        return [report.shift.declared_at for report in self.reports if report.shift.kind == kind]

    def on_start(self, status: Status) -> None:
        """Do nothing."""

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Do nothing."""

    def on_shift(self, report: ShiftReport) -> None:
        """Record a shift."""
        self.reports.append(report)

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Record the accuracy, in stream order."""
        del batch, status
        self.correct += step.record_correct


def exchanged(folder: Path, task: str, seed: int) -> tuple[list[dict[str, Any]], int]:
    """The stream, and the index of the first record whose label is replaced by the next one in alphabetical order."""
    rng = random.Random(f"{seed} {task}")
    rows = list(read_task(folder, task, "train"))
    rng.shuffle(rows)
    labels = sorted({row["completion"] for row in rows})
    after = dict(zip(labels, [*labels[1:], labels[0]], strict=True))
    passes = [rng.sample(rows[:DISTINCT], DISTINCT) for _ in range(PASSES + PASSES_AFTER)]
    first = [row for each in passes[:PASSES] for row in each]
    second = [{**row, "completion": after[row["completion"]]} for each in passes[PASSES:] for row in each]
    return [*first, *second], len(first)


def run(rows: Sequence[dict[str, Any]], arm: str, seed: int) -> _Recorder:
    """Run the daemon on the stream, without hold-out records."""
    recorder = _Recorder()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stream.jsonl"
        file.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
        no_holdout = {"holdout.every_records": 0}
        state = Path(folder) / "state"
        nano = read_profile("nano")
        components = Components(read_arm(arm, nano, seed=seed, state=state, stream=file, shared=no_holdout).settings)
        Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1), observer=recorder).run()
        components.close()
    return recorder


def recovery(accuracy: Sequence[float], half: int) -> tuple[float, int | None]:
    """The level before the exchange, and the number of records until the accuracy has recovered; None if it never does.

    `accuracy` is that of each record, averaged over the seeds. `half` is the index of the first exchanged label.
    """
    level = fmean(accuracy[half - DISTINCT : half])
    total = sum(accuracy[half : half + DISTINCT])
    for end in range(half + DISTINCT, len(accuracy) + 1):
        if total >= RECOVERED * level * DISTINCT - 1e-9:
            return level, end - half
        total += accuracy[end] - accuracy[end - DISTINCT] if end < len(accuracy) else 0.0
    return level, None


def measure_all(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The metrics of every task of `TASKS` in the folder."""
    present = [task for task in TASKS if any(folder.glob(f"{task}*.train.jsonl.gz"))]
    return {task: measure(folder, task, seeds) for task in present}


def measure(folder: Path, task: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The metrics of one task."""
    streams = [exchanged(folder, task, seed) for seed in seeds]
    half = streams[0][1]
    default, lora = (
        [run(rows, arm, seed) for seed, (rows, _) in zip(seeds, streams, strict=True)]
        for arm in ("streamlearn", "lora")
    )
    level, recovered_after = recovery(_mean_over_seeds(default), half)
    lora_level, lora_recovered_after = recovery(_mean_over_seeds(lora), half)
    answers = [each.declared_at("answers") for each in default]
    inputs = [at for each in default for at in each.declared_at("inputs")]
    declared_after = [next((at - half for at in each if at > half), None) for each in answers]
    return {
        "declared_after": declared_after,
        "false_alarms": sum(map(len, answers)) - sum(each is not None for each in declared_after),
        "new_regimes": sum(at > half for at in inputs),
        "level": round(level, 3),
        "recovered_after": recovered_after,
        "lora_level": round(lora_level, 3),
        "lora_recovered_after": lora_recovered_after,
        "ratio": _ratio(recovered_after, lora_recovered_after),
    }


def _ratio(part: int | None, whole: int | None) -> float | None:
    return None if part is None or whole is None else round(part / whole, 3)


def _mean_over_seeds(runs: Sequence[_Recorder]) -> list[float]:
    return [fmean(correct) for correct in zip(*(each.correct for each in runs), strict=True)]


def table(result: dict[str, dict[str, Any]]) -> Table:
    """The metrics as a table, one row per task."""
    names = tuple(next(iter(result.values()), {}))
    shown = Table("answers exchanged", *(name.replace("_", " ") for name in names), box=None, pad_edge=False)
    for task, row in result.items():
        shown.add_row(task, *(_cell(row[name]) for name in names))
    return shown


def _cell(value: float | list[float | None] | None) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "-" if value is None else f"{value:.2f}".removesuffix(".00")
