"""The answers change and the inputs do not: a classification task whose labels are exchanged halfway.

The bundled backbone learns next to nothing about sentiment from 500 records seen once (0.53 right where a coin gets
0.5), and an exchange of guesses shows nothing. So `DISTINCT` records come `PASSES` times, in another order each time,
and again as often with the labels exchanged: what it has learned by heart is then wrong.

- declared_after: records between the exchange and the declared shift of the answers; null when there was none
- false_alarms: shifts of the answers declared before the exchange
- new_regimes: regimes declared after it; the inputs are the same, so each is a mistake
- level: prequential accuracy over the last 100 records before the exchange (before each record is learned)
- recovered_after: records until the accuracy over 50 records is back at 90 % of the level; null when it never is
- lora_recovered_after: the same for preset `lora` on the same records; ratio is the quotient
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson
from rich.table import Table

from streamlearn.adaptation import Entry
from streamlearn.assembly import Rooms
from streamlearn.bench.forgetting import settings_of
from streamlearn.bench.superni import read_task
from streamlearn.daemon import Daemon
from streamlearn.learner.learner import Step
from streamlearn.serve.jobs import JobQueue
from streamlearn.serve.status import Board, Clock, Phase, Status
from streamlearn.snapshot.snapshot import SnapshotInfo
from streamlearn.stream.batch import Batch

TASKS = ("task363", "task875", "task1687")
LEVEL_RECORDS, WINDOW, BACK = 100, 50, 0.9
DISTINCT, PASSES = 150, 6


class _Notes:
    """What was right, record by record, and what was declared."""

    def __init__(self) -> None:
        self.correct: list[bool] = []
        self.entries: list[Entry] = []

    def on_start(self, status: Status) -> None:
        """Nothing."""

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Nothing."""

    def on_shift(self, entry: Entry) -> None:
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
    passes = [rng.sample(rows[:DISTINCT], DISTINCT) for _ in range(2 * PASSES)]
    first = [row for each in passes[:PASSES] for row in each]
    second = [{**row, "completion": after[row["completion"]]} for each in passes[PASSES:] for row in each]
    return [*first, *second], len(first)


def run(rows: Sequence[dict[str, Any]], arm: str, seed: int) -> _Notes:
    """The stream through the daemon, nothing kept out."""
    notes = _Notes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stream.jsonl"
        file.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
        rooms = Rooms(settings_of(f"{arm}:holdout.every_records=0", seed, Path(folder), file))
        Daemon(rooms, Board(Status(Phase.STARTING), Clock()), JobQueue(1), observer=notes).run()
        rooms.close()
    return notes


def recovery(correct: Sequence[bool], half: int) -> tuple[float, int | None]:
    """Accuracy before the exchange, and how many records it took to come back to most of it."""
    level = fmean(correct[half - LEVEL_RECORDS : half])
    for end in range(half + WINDOW, len(correct) + 1):
        if fmean(correct[end - WINDOW : end]) >= BACK * level:
            return level, end - half
    return level, None


def measure_all(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Every task of `TASKS` that the folder holds."""
    present = [task for task in TASKS if any(folder.glob(f"{task}*.train.jsonl.gz"))]
    return {task: measure(folder, task, seed) for task in present}


def measure(folder: Path, task: str, seed: int) -> dict[str, Any]:
    """One task and seed."""
    rows, half = exchanged(folder, task, seed)
    found, plain = (run(rows, arm, seed) for arm in ("streamlearn", "lora"))
    answers = [entry.shift.declared_at for entry in found.entries if entry.shift.kind == "answers"]
    level, back = recovery(found.correct, half)
    plain_level, plain_back = recovery(plain.correct, half)
    return {
        "declared_after": next((at - half for at in answers if at > half), None),
        "false_alarms": sum(at <= half for at in answers),
        "new_regimes": sum(e.shift.kind == "inputs" and e.shift.declared_at > half for e in found.entries),
        "level": level,
        "recovered_after": back,
        "lora_level": plain_level,
        "lora_recovered_after": plain_back,
        "ratio": None if back is None or plain_back is None else back / plain_back,
    }


def table(result: dict[str, dict[str, Any]]) -> Table:
    """The figures for a person, one task a line."""
    names = tuple(next(iter(result.values()), {}))
    shown = Table("answers exchanged", *(name.replace("_", " ") for name in names), box=None, pad_edge=False)
    for task, row in result.items():
        cells = ("-" if row[name] is None else f"{row[name]:.2f}".removesuffix(".00") for name in names)
        shown.add_row(task, *cells)
    return shown
