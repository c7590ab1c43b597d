"""What many regimes cost: speed, memory and snapshots by their number.

    python -m benchmarks.regimes --json --plot regimes.png > regimes.json

The daemon learns one task after another, drawn by seed from the file of other tasks, with their definitions. Then all
tasks return once, in another order and with other records (`returns`). At each checkpoint, over `WINDOW` batches, each
of one regime and without the probe of a new one, it measures

- the step's time, next to that of a learner with one regime on the same batch, taken in turns;
- the time of everything else that the loop does with a record: reading, decoding, detection, journal;
- the process's memory, and a snapshot like any other: the second one before it was written a batch earlier.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.daemon import without_http
from benchmarks.data import to_lines
from benchmarks.measuring import OTHERS, check_plot, command, parser, resident_mib, show
from benchmarks.returns import TwoRounds, settings_of
from streamlearn.adapters.check import activated_parameters
from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.daemon.model import adapter_of
from streamlearn.learner.learner import Learner, Step
from streamlearn.settings import AdapterSettings, Settings
from streamlearn.shift.monitor import AssignedBatch

CHECKPOINTS = (8, 32, 64, 128, 192, 256)
"""Numbers of regimes to measure at, besides that at the end."""
WINDOW = 24
"""Batches that a checkpoint looks at."""
NEAR = 4 * WINDOW
"""The last batches of the stream, in which it is measured once more."""
SNAPSHOTS = 3
"""Snapshots in a row at a checkpoint, after a batch each; the last one is measured."""
HEADINGS = {
    "regimes": "regimes",
    "in_memory": "loaded",
    "tokens_per_s": "tokens/s",
    "step_over_one_regime": "of one's",
    "other_ms_per_record": "other ms",
    "memory_mib": "MiB",
    "snapshot_mib": "snapshot",
    "new_mib": "written",
    "snapshot_s": "s",
}
BLUE, ORANGE, GRAY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito


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


def measure(others: Path, *, tasks: int, records: int, backbone: Path | None, seed: int) -> dict[str, Any]:
    """Run the daemon over both rounds; JSON-ready."""
    drawn = TwoRounds.draw(others, tasks=tasks, records=records, seed=seed)
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
        "records": records,
        "seed": seed,
        "max_in_memory": settings.adapter.max_in_memory,
        "adapter_parameters": activated_parameters(resolve(AdapterSettings()), outline(settings.backbone).linears),
        "checkpoints": [costs.to_json() for costs in daemon.checkpoints],
        "regimes_at_the_end": regimes_at_the_end,
        "restart_s": round(restart_s, 1),
        **drawn.returns(daemon.regimes),
    }


def table(result: Mapping[str, Any]) -> Table:
    """Build the table of checkpoints; sizes in MiB."""
    shown = Table(*HEADINGS.values(), box=None, pad_edge=False)
    for row in result["checkpoints"]:
        shown.add_row(*(f"{row[name]:,.4g}" if row[name] < 1000 else f"{row[name]:,.0f}" for name in HEADINGS))
    return shown


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Plot speed, memory and the size of a snapshot."""
    from matplotlib import pyplot as plt  # noqa: PLC0415 - an extra

    rows = result["checkpoints"]
    regimes = [row["regimes"] for row in rows]
    figure, (speed, memory, disk) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for axis, key, color, label in (
        (speed, "step_over_one_regime", BLUE, "training step"),
        (memory, "memory_mib", BLUE, "process"),
        (disk, "snapshot_mib", BLUE, "size of a snapshot"),
        (disk, "new_mib", ORANGE, "written, the rest is linked"),
    ):
        axis.plot(regimes, [row[key] for row in rows], marker="o", markersize=4, color=color, label=label)
    speed.axhspan(0.95, 1.05, color=GRAY, alpha=0.12, linewidth=0)
    speed.set(title="Speed, relative to a learner with one regime", ylim=(0, 1.3))
    memory.set(title="Resident memory, MiB")
    memory.axvline(result["max_in_memory"], color=GRAY, linewidth=1, linestyle=":", label="adapters kept in memory")
    disk.set(title="Snapshot, MiB")
    for axis in (speed, memory, disk):
        axis.set_xlabel("regimes")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--others", type=Path, default=OTHERS, help="file of texts of other tasks")
    options.add_argument("--tasks", type=int, default=300, help="tasks, one after another")
    options.add_argument("--records", type=int, default=30, help="records of a task, and again of its return")
    options.add_argument("--backbone", type=Path, help="folder of a causal language model; by default nano")
    options.add_argument("--seed", type=int, default=0, help="draws tasks and records")
    options.add_argument("--plot", type=Path, help="also plot to this file")
    given = options.parse_args()
    plot = check_plot(given.plot) if given.plot else None
    result = measure(given.others, tasks=given.tasks, records=given.records, backbone=given.backbone, seed=given.seed)
    if plot is not None:
        draw(result, plot)
    line = (
        f"returns recognized: {result['recognized']:.3f} of {result['tasks']} tasks; in their task's regime: "
        f"{result['purity']:.3f} of the records; restart with {result['regimes_at_the_end']} regimes: "
        f"{result['restart_s']:.1f} s"
    )
    show(result, table(result), line, as_json=given.json)


if __name__ == "__main__":
    command(main)
