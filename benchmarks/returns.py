"""How many returns of tasks are recognized, and how many new tasks are taken for known ones.

    python -m benchmarks.returns --json > returns.json
    python -m benchmarks.returns --bare --learn --tasks 20 --records 60 --json

The stream is that of `regimes`: many tasks, one after another, that all return once. Only the monitor reads it, which
assigns records to regimes by their inputs; with `--learn` the daemon does, which also checks each supposed return by
its losses.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.daemon import without_http
from benchmarks.data import read_texts, to_lines, to_record
from benchmarks.measuring import OTHERS, command, parser, show
from benchmarks.streams import BATCH_RECORDS, text_decoder
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import UsageError
from streamlearn.learner.learner import Step
from streamlearn.settings import (
    BackboneSettings,
    JsonlSettings,
    Settings,
    ShiftSettings,
    SnapshotSettings,
    SourceSettings,
)
from streamlearn.shift.monitor import AssignedBatch, Monitor
from streamlearn.stream.record import Batch, Example

COLUMNS = ("records", "regimes", "recognized", "taken_for_known", "purity")
LEARNED_COLUMNS = ("refused", "prequential_loss", "forgetting")


@dataclass(frozen=True)
class TwoRounds:
    """The stream: segments of `records` records of one task; the second half are returns, in another order."""

    segments: tuple[str, ...]
    """The task of each."""
    records: int
    stream: tuple[dict[str, Any], ...]

    @classmethod
    def draw(cls, others: Path, *, tasks: int, records: int, seed: int, bare: bool = False) -> "TwoRounds":
        """Draw tasks, and records of each that differ between the rounds; `bare` leaves definitions out.

        Raises:
            UsageError: there is no such file, or too few of its tasks have twice as many records.
        """
        texts = {name: rows for name, rows in read_texts(others).items() if len(rows) >= 2 * records}
        if len(texts) < tasks:
            raise UsageError(
                f"{others}: expected {tasks} tasks with {2 * records} records, found {len(texts)}; lower --tasks"
            )
        names = random.Random(seed).sample(sorted(texts), tasks)
        rows = {name: random.Random(f"{name} {seed}").sample(texts[name], 2 * records) for name in names}
        again = random.Random(f"again {seed}").sample(names, tasks)
        drawn = [row for name in names for row in rows[name][:records]]
        drawn += [row for name in again for row in rows[name][records:]]
        return cls((*names, *again), records, tuple(to_record(row, bare=bare) for row in drawn))

    def returns(self, regimes: Sequence[int]) -> dict[str, float]:
        """Shares of returns that were recognized, of new tasks taken for known ones, and of records in their regime.

        A task's regime is the one that most of its records belonged to in the first round. A return is recognized if
        most of its records belong to that. A new task was taken for a known one if its regime is another task's.

        Args:
            regimes: Of each record of the stream.
        """
        by_segment = [Counter(regimes[i : i + self.records]) for i in range(0, len(regimes), self.records)]
        majority: dict[str, int] = {}
        recognized = taken = own = 0
        for task, counts in zip(self.segments, by_segment, strict=True):
            regime = counts.most_common(1)[0][0]
            recognized += task in majority and majority[task] == regime
            taken += task not in majority and regime in majority.values()
            own += counts[majority.setdefault(task, regime)]
        return {
            "recognized": round(2 * recognized / len(self.segments), 4),
            "taken_for_known": round(2 * taken / len(self.segments), 4),
            "purity": round(own / len(regimes), 4),
        }


def settings_of(folder: Path, backbone: Path | None, tasks: int, seed: int) -> Settings:
    """Return the default configuration, with room for a regime per task, and for some that are split in error."""
    return Settings(
        state=folder / "state",
        seed=seed,
        source=SourceSettings(jsonl=JsonlSettings(path=folder / "stream.jsonl")),
        backbone=BackboneSettings() if backbone is None else BackboneSettings(model=str(backbone)),
        shift=ShiftSettings(max_regimes=max(ShiftSettings().max_regimes, tasks + tasks // 4)),
        snapshot=SnapshotSettings(every_records=1 << 30, every_s=1e9),  # when a benchmark takes one
    )


def measure(drawn: TwoRounds) -> dict[str, Any]:
    """Assign the records of both rounds by their inputs; JSON-ready."""
    decoder, _ = text_decoder()
    tasks = len(drawn.segments) // 2
    monitor = Monitor(ShiftSettings(max_regimes=tasks + tasks // 4), seed=0)
    regimes = list(_regimes(monitor, [decoder.decode_value(record) for record in drawn.stream]))
    return {"records": drawn.records, "regimes": len(set(regimes)), **drawn.returns(regimes)}


def _regimes(monitor: Monitor, examples: Sequence[Example]) -> Iterator[int]:
    """The number of each record's regime when it is released for training."""
    numbers: dict[int, int] = {}

    def released(batches: Sequence[AssignedBatch]) -> Iterator[int]:
        for batch in batches:
            numbers.update({shift.slot: shift.regime for shift in batch.shifts})
            yield from (numbers[slot] for slot in batch.slots)

    for start in range(0, len(examples), BATCH_RECORDS):
        monitor.update(Batch((), tuple(examples[start : start + BATCH_RECORDS])))
        yield from released([*iter(monitor.take, None)])
    monitor.flush()
    yield from released([*iter(monitor.take, None)])


class RecordingDaemon(Daemon):
    """The daemon in this process. It notes the regime of every record, and the losses of those it trains on."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(Components(settings), *without_http())
        self.regimes: list[int] = []
        self.losses: list[float] = []

    def learn(self, assigned: AssignedBatch) -> Step | None:
        step = super().learn(assigned)
        self.regimes += [self.adaptation.numbers[slot] for slot in assigned.slots]
        self.losses += step.record_losses if step is not None else ()
        return step


def measure_learned(drawn: TwoRounds, backbone: Path | None, seed: int) -> dict[str, Any]:
    """Learn both rounds in the daemon; JSON-ready.

    `refused` is the number of returns that were refused, `forgetting` that on the hold-out records at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(Path(folder), backbone, len(drawn.segments) // 2, seed)
        (Path(folder) / "stream.jsonl").write_bytes(to_lines(drawn.stream))
        daemon = RecordingDaemon(settings)
        daemon.run()
        daemon.score_all()
        status = daemon.adaptation.status()
        daemon.components.close()
    return {
        "records": drawn.records,
        "regimes": len(set(daemon.regimes)),
        **drawn.returns(daemon.regimes),
        "refused": sum(shift.refused_return is not None for shift in status.shifts),
        "prequential_loss": round(fmean(daemon.losses), 4),
        "forgetting": None if status.average_forgetting is None else round(status.average_forgetting, 4),
    }


def table(result: Mapping[str, Any]) -> Table:
    columns = (*COLUMNS, *(LEARNED_COLUMNS if result["learned"] else ()))
    shown = Table(*columns, box=None, pad_edge=False)
    for row in result["returns"]:
        shown.add_row(*(f"{row[name]}" for name in columns))
    return shown


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--others", type=Path, default=OTHERS, help="file of texts of other tasks")
    options.add_argument("--tasks", type=int, default=300, help="tasks, one after another")
    options.add_argument("--records", type=int, nargs="+", default=[24, 48, 60], help="records of a task each time")
    options.add_argument("--seed", type=int, default=0, help="draws tasks and records")
    options.add_argument("--bare", action="store_true", help="leave the tasks' definitions out of the prompts")
    options.add_argument("--learn", action="store_true", help="learn, and check returns by their losses")
    options.add_argument("--backbone", type=Path, help="with --learn: folder of a causal language model; else nano")
    given = options.parse_args()
    streams = [
        TwoRounds.draw(given.others, tasks=given.tasks, records=records, seed=given.seed, bare=given.bare)
        for records in given.records
    ]
    result = {
        "tasks": given.tasks,
        "seed": given.seed,
        "prompts": "bare" if given.bare else "definitions",
        "learned": given.learn,
        "returns": [
            measure_learned(drawn, given.backbone, given.seed) if given.learn else measure(drawn) for drawn in streams
        ],
    }
    show(result, table(result), as_json=given.json)


if __name__ == "__main__":
    command(main)
