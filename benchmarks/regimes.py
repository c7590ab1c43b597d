"""What many regimes cost, by their number, and how many returns of tasks are recognized.

    python -m benchmarks.regimes --json > regimes.json
    python -m benchmarks.regimes --returns 24 48 60 --json > returns.json

The daemon learns one task after another, drawn by seed from the file of other tasks, with their definitions. Then all
tasks return once, in another order and with other records. At each checkpoint, over `WINDOW` batches, each of one
regime and without the probe of a new one, it measures

- the step's time, next to that of a learner with one regime on the same batch, taken in turns;
- the time of everything else that the loop does with a record: reading, decoding, detection, journal;
- the process's memory, and a snapshot like any other: the second one before it was written a batch earlier.

With `--returns` only the monitor reads such streams, which assigns records to regimes by their inputs.
"""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.daemon import without_http
from benchmarks.data import read_texts, to_lines, to_record
from benchmarks.measuring import OTHERS, command, grid, natural, parser, positive, resident_mib, show
from benchmarks.streams import BATCH_RECORDS, text_decoder, text_featurizer
from streamlearn.adapters.presets import activated_parameters, resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.daemon.model import adapter_of
from streamlearn.errors import UsageError
from streamlearn.learner.learner import Learner, Step
from streamlearn.settings import (
    AdapterSettings,
    BackboneSettings,
    JsonlSettings,
    Settings,
    ShiftSettings,
    SnapshotSettings,
    SourceSettings,
)
from streamlearn.shift.monitor import AssignedBatch, Monitor
from streamlearn.stream.record import Batch, Example

COLUMNS = ("regimes", "recognized", "taken_for_known", "purity")


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


def measure_returns(drawn: TwoRounds, backbone: Path | None = None) -> dict[str, Any]:
    """Assign the records of both rounds by their inputs; JSON-ready."""
    decoder = text_decoder(backbone)
    tasks = len(drawn.segments) // 2
    monitor = Monitor(ShiftSettings(max_regimes=tasks + tasks // 4), text_featurizer(backbone))
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


CHECKPOINTS = (8, 32, 64, 128, 192, 256)
"""Numbers of regimes to measure at, besides that at the end."""
WINDOW = 24
"""Batches that a checkpoint looks at."""
NEAR = 4 * WINDOW
"""The last batches of the stream, in which it is measured once more."""
SNAPSHOTS = 3
"""Snapshots in a row at a checkpoint, after a batch each; the last one is measured."""
HEADINGS = {
    "in_memory": "loaded",
    "tokens_per_s": "tokens/s",
    "step_over_one_regime": "of one's",
    "other_ms_per_record": "other ms",
    "memory_mib": "MiB",
    "snapshot_mib": "snapshot",
    "new_mib": "written",
    "snapshot_s": "s",
}


@dataclass(frozen=True)
class RegimeCosts:
    """What is measured at one number of regimes."""

    regimes: int
    in_memory: int
    """Adapters in memory."""
    records: int
    tokens_per_s: float
    """Median over the batches of the window."""
    step_over_one_regime: float
    """Ratio to the median of a learner with one regime on the same batches."""
    other_ms_per_record: float
    """Everything but the step."""
    memory_mib: float
    """Resident memory of the process, including the learner with one regime."""
    snapshot_mib: float
    """Size of a snapshot."""
    new_mib: float
    """What of it was written; the rest is linked."""
    snapshot_s: float

    def to_json(self) -> dict[str, Any]:
        digits = {"tokens_per_s": 0, "memory_mib": 0, "snapshot_mib": 1, "new_mib": 1}
        return {key: round(value, digits.get(key, 3)) for key, value in asdict(self).items()}


@dataclass
class _BatchCosts:
    records: int
    speed: float
    """Of the step, tokens per second."""
    reference_speed: float
    other_s: float


class MeasuredDaemon(Daemon):
    """The daemon in this process, with a learner of one regime next to it."""

    def __init__(self, settings: Settings, numbers: Sequence[int], records: int) -> None:
        """Measure at these numbers of regimes, ascending, and at the end of a stream of so many records."""
        super().__init__(Components(settings), *without_http())
        settings = self.components.settings  # with the values that depend on others
        self.checkpoints: list[RegimeCosts] = []
        self.regimes: list[int] = []
        """Number of the regime of each record."""
        self._due = [*numbers, settings.shift.max_regimes + 1]
        self._last = records - NEAR * settings.stream.batch_records
        self._window: list[_BatchCosts] = []
        self._saves = 0
        self._turn = False
        backbone = load(settings.backbone, outline(settings.backbone))
        peft = attach(backbone.model, adapter_of(settings), settings.seed)
        self._reference = Learner(peft, settings.learner, backbone.device)
        self._ended = time.perf_counter()

    def learn(self, assigned: AssignedBatch) -> Step | None:
        """Train on a batch, and near a checkpoint the learner of one regime as well: before or after it, in turns."""
        near = len(self.adaptation.numbers) >= self._due[0] - WINDOW // 2 or self.state.records >= self._last
        step = self._compare(assigned) if near else super().learn(assigned)
        self.regimes += [self.adaptation.numbers[slot] for slot in assigned.slots]
        if len(self._window) >= WINDOW and self._is_due():
            self.save()
            self._saves += 1
            if self._saves == SNAPSHOTS:
                self._checkpoint()
        self._ended = time.perf_counter()
        return step

    def _compare(self, assigned: AssignedBatch) -> Step | None:
        examples, alone = assigned.batch.examples, [0] * len(assigned.slots)
        self._turn = not self._turn
        other_s = time.perf_counter() - self._ended
        reference = self._reference.step(examples, alone) if self._turn else None
        began = time.perf_counter()
        step = super().learn(assigned)
        seconds = time.perf_counter() - began
        reference = reference or self._reference.step(examples, alone)
        if step is not None and not assigned.shifts and len(set(assigned.slots)) == 1:
            costs = _BatchCosts(
                len(examples),
                step.tokens / step.seconds,
                reference.tokens / reference.seconds,
                other_s + seconds - step.seconds,
            )
            self._window = [*self._window[1 - WINDOW :], costs]
        return step

    def _is_due(self) -> bool:
        at_end = self.state.records >= self._last + NEAR // 2 * self.components.settings.stream.batch_records
        return len(self.adaptation.numbers) >= self._due[0] or at_end

    def _checkpoint(self) -> None:
        store, window, written = self.components.store, self._window, self.state.last_snapshot
        speed = median(costs.speed for costs in window)
        self.checkpoints.append(
            RegimeCosts(
                regimes=len(self.adaptation.numbers),
                in_memory=self.learner.cache.num_in_memory,
                records=self.state.records,
                tokens_per_s=speed,
                step_over_one_regime=speed / median(costs.reference_speed for costs in window),
                other_ms_per_record=1e3 * median(costs.other_s / costs.records for costs in window),
                memory_mib=resident_mib(),
                snapshot_mib=store.infos()[-1].bytes / 2**20,
                new_mib=store.new_bytes / 2**20,
                snapshot_s=(written.write_seconds or 0.0) if written is not None else 0.0,
            )
        )
        if len(self._due) > 1:
            self._due.pop(0)
        self._saves, self._window = 0, []


def settings_of(folder: Path, backbone: Path | None, tasks: int, seed: int) -> Settings:
    """Return the default configuration, with room for a regime per task, and for some that are split in error."""
    return Settings(
        state=folder / "state",
        seed=seed,
        source=SourceSettings(jsonl=JsonlSettings(path=folder / "stream.jsonl")),
        backbone=BackboneSettings() if backbone is None else BackboneSettings(model=str(backbone)),
        shift=ShiftSettings(max_regimes=max(ShiftSettings().max_regimes, tasks + tasks // 4)),
        snapshot=SnapshotSettings(every_records=1 << 30, every_s=1e9),  # at checkpoints only
    )


def measure(drawn: TwoRounds, backbone: Path | None, seed: int) -> dict[str, Any]:
    """Run the daemon over both rounds; JSON-ready."""
    tasks = len(drawn.segments) // 2
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(Path(folder), backbone, tasks, seed)
        (Path(folder) / "stream.jsonl").write_bytes(to_lines(drawn.stream))
        daemon = MeasuredDaemon(settings, CHECKPOINTS, len(drawn.stream))
        daemon.run()
        daemon.components.close()
        began = time.perf_counter()
        restarted = Components(settings)
        restart_s = time.perf_counter() - began
        regimes_at_the_end = len(restarted.adaptation.numbers)
        restarted.close()
    return {
        "tasks": tasks,
        "records": drawn.records,
        "seed": seed,
        "max_in_memory": settings.adapter.max_in_memory,
        "adapter_parameters": activated_parameters(resolve(AdapterSettings()), outline(settings.backbone).linears),
        "checkpoints": [costs.to_json() for costs in daemon.checkpoints],
        "regimes_at_the_end": regimes_at_the_end,
        "restart_s": round(restart_s, 1),
        **drawn.returns(daemon.regimes),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--others", type=Path, default=OTHERS, help="file of texts of other tasks")
    options.add_argument("--tasks", type=positive, default=300, help="tasks, one after another")
    options.add_argument("--records", type=positive, default=30, help="records of a task, and again of its return")
    options.add_argument("--backbone", type=Path, help="folder of a causal language model; by default nano")
    options.add_argument("--seed", type=natural, default=0, help="draws tasks and records")
    options.add_argument("--returns", type=positive, nargs="+", help="assign records only; records of a task each time")
    options.add_argument("--bare", action="store_true", help="with --returns: leave out the tasks' definitions")
    given = options.parse_args()
    draw = partial(TwoRounds.draw, given.others, tasks=given.tasks, seed=given.seed)
    if given.returns:
        measured = [
            measure_returns(draw(records=records, bare=given.bare), given.backbone) for records in given.returns
        ]
        prompts = "bare" if given.bare else "definitions"
        result = {"tasks": given.tasks, "seed": given.seed, "prompts": prompts, "returns": measured}
        show(result, grid({f"{row['records']}": row for row in measured}, COLUMNS, "records"), as_json=given.json)
        return
    result = measure(draw(records=given.records), given.backbone, given.seed)
    line = (
        f"returns recognized: {result['recognized']:.3f} of {result['tasks']} tasks; in their task's regime: "
        f"{result['purity']:.3f} of the records; restart with {result['regimes_at_the_end']} regimes: "
        f"{result['restart_s']:.1f} s"
    )
    rows = {f"{row['regimes']}": row for row in result["checkpoints"]}
    show(result, grid(rows, HEADINGS, "regimes"), line, as_json=given.json)


if __name__ == "__main__":
    command(main)
