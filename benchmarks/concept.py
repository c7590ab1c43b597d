"""Concept drift: a classification task whose labels are exchanged halfway, while the inputs stay the same.

    python -m benchmarks.concept --json        (also a part of `python -m benchmarks.detect`)

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
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.daemon import QuietObserver, run_daemon
from benchmarks.data import read_task, to_lines
from benchmarks.learn.methods import read_arm, read_profile
from streamlearn.learner.learner import Step
from streamlearn.regimes.report import ShiftReport
from streamlearn.status import Status
from streamlearn.stream.record import Batch

TASKS = ("task363", "task875", "task1687")
DISTINCT, PASSES, PASSES_AFTER = 150, 6, 10
RECOVERED = 0.9
"""Share of the level at which the accuracy counts as recovered."""


class Recorder(QuietObserver):
    """Records the prequential accuracy of every record, in stream order, and the declared shifts."""

    def __init__(self) -> None:
        self.correct: list[bool] = []
        self.reports: list[ShiftReport] = []

    def declared_at(self, kind: str) -> list[int]:
        return [report.shift.declared_at for report in self.reports if report.shift.kind == kind]

    def on_shift(self, report: ShiftReport) -> None:
        self.reports.append(report)

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        del batch, status
        self.correct += step.record_correct


def exchanged(folder: Path, task: str, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Return the stream, and the index of the first record whose label is replaced by the next one by alphabet."""
    rng = random.Random(f"{seed} {task}")
    rows = list(read_task(folder, task, "train"))
    rng.shuffle(rows)
    labels = sorted({row["completion"] for row in rows})
    after = dict(zip(labels, [*labels[1:], labels[0]], strict=True))
    passes = [rng.sample(rows[:DISTINCT], DISTINCT) for _ in range(PASSES + PASSES_AFTER)]
    first = [row for drawn in passes[:PASSES] for row in drawn]
    second = [{**row, "completion": after[row["completion"]]} for drawn in passes[PASSES:] for row in drawn]
    return [*first, *second], len(first)


def run(rows: Sequence[dict[str, Any]], arm: str, seed: int) -> Recorder:
    """Run the daemon on the stream, without hold-out records."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        file, state = Path(folder) / "stream.jsonl", Path(folder) / "state"
        file.write_bytes(to_lines(rows))
        no_holdout = {"holdout.every_records": 0}
        run_daemon(
            read_arm(arm, read_profile("nano"), seed=seed, state=state, stream=file, shared=no_holdout).settings,
            recorder,
        )
    return recorder


def recovery(accuracy: Sequence[float], half: int) -> tuple[float, int | None]:
    """Return the level before the exchange, and the records until the accuracy has recovered; None if it never does.

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
    """Return the metrics of every task of `TASKS` in the folder."""
    present = [task for task in TASKS if any(folder.glob(f"{task}*.train.jsonl.gz"))]
    return {task: measure(folder, task, seeds) for task in present}


def measure(folder: Path, task: str, seeds: Sequence[int]) -> dict[str, Any]:
    streams = [exchanged(folder, task, seed) for seed in seeds]
    half = streams[0][1]
    default, lora = (
        [run(rows, arm, seed) for seed, (rows, _) in zip(seeds, streams, strict=True)]
        for arm in ("streamlearn", "lora")
    )
    level, recovered_after = recovery(_mean_over_seeds(default), half)
    lora_level, lora_recovered_after = recovery(_mean_over_seeds(lora), half)
    answers = [recorder.declared_at("answers") for recorder in default]
    inputs = [at for recorder in default for at in recorder.declared_at("inputs")]
    declared_after = [next((at - half for at in declared if at > half), None) for declared in answers]
    return {
        "declared_after": declared_after,
        "false_alarms": sum(map(len, answers)) - sum(after is not None for after in declared_after),
        "new_regimes": sum(at > half for at in inputs),
        "level": round(level, 3),
        "recovered_after": recovered_after,
        "lora_level": round(lora_level, 3),
        "lora_recovered_after": lora_recovered_after,
    }


def _mean_over_seeds(recorders: Sequence[Recorder]) -> list[float]:
    return [fmean(correct) for correct in zip(*(recorder.correct for recorder in recorders), strict=True)]
