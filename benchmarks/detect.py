"""Detection of input shifts: delay, misses, false alarms and the assignment of records to regimes.

    python -m benchmarks.detect --json

The streams consist of real tasks (`streams`), with and without the definition in the prompt. A shift that is declared
within `WITHIN` records of a boundary (of the end of the ramp, where the change is gradual) and before the next boundary
detects it. Every other shift except the first is a false alarm; a shift when a producer leaves is optional and counts
neither way. The metrics:

- recall, precision, mean_delay_records: of boundaries and shifts; the delay is counted from the boundary's first record
- false_alarms_per_10k: shifts per 10,000 records in streams that never change, in random order and autocorrelated
- recurrence_recall: returns detected and assigned to the regime that received most of the task's earlier records
- novelty_recall: new tasks detected and declared new
- record_assignment: records in the regime of their task, under the best one-to-one matching of tasks and regimes
- single_assignment: the same for records that were not in the stream, each classified by itself

A detector's headline metrics come from the abrupt streams; `recurrence_recall` comes from the recurring streams and
`record_assignment` from all streams of several tasks. `kinds` holds all metrics of each kind of stream. `answers` holds
shifts of the answers in real training (`concept`), and with `--others` `others` has boundaries between other tasks and
the rate of false alarms on them (`false_alarms`).
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks import concept, false_alarms
from benchmarks.measuring import SHARED, command, grid, parser, show
from benchmarks.streams import (
    MIN_TASKS,
    PROMPTS,
    RAMP,
    Assigned,
    Boundary,
    Stream,
    StreamMaker,
    Task,
    matches,
    one_to_one,
    ratio,
    read_folder,
    run_monitor,
    text_decoder,
    to_task,
)
from streamlearn.settings import ShiftSettings
from streamlearn.shift.change_tests import WINDOW_TESTS, WindowTest
from streamlearn.shift.detector import Shift
from streamlearn.shift.features import input_of
from streamlearn.shift.monitor import Monitor
from streamlearn.stream.record import Example

WITHIN = 64
PERIOD = 200
MAX_SINGLE_RECORDS = 40
"""Maximum records of each task that are classified by themselves."""
STATIONARY_KINDS = ("stationary", "autocorrelated")
TABLE_WIDTH = 120
CONCEPT_SEEDS = 3  # each takes six runs of the daemon of about a minute
HEADINGS = {
    "recall": "found",
    "precision": "right",
    "mean_delay_records": "delay",
    "false_alarms_per_10k": "FA/10k",
    "false_alarms_per_10k_autocorrelated": "auto.",
    "recurrence_recall": "recur.",
    "record_assignment": "assign.",
    "single_assignment": "single",
    "us_per_record": "us",
}
"""Columns of the table, described in the module's docstring."""

Classify = Callable[[Sequence[Example]], list[int]]
"""Slots of records outside the stream, each classified by itself."""
Run = Callable[[Stream, Sequence[Task]], tuple[Assigned, Classify | None]]


@dataclass
class Tally:
    """Counts, summed over streams before any ratio is computed."""

    records: int = 0
    seconds: float = 0.0
    boundaries: int = 0
    hits: int = 0
    false_alarms: int = 0
    delays: list[int] = field(default_factory=list)
    returns: int = 0
    recognized: int = 0
    novelties: int = 0
    declared_new: int = 0
    mixed_records: int = 0
    assigned: int = 0
    singles: int = 0
    singles_assigned: int = 0

    def metrics(self) -> dict[str, float | None]:
        return {
            "records": self.records,
            "boundaries": self.boundaries,
            "recall": ratio(self.hits, self.boundaries),
            "precision": ratio(self.hits, self.hits + self.false_alarms),
            "mean_delay_records": ratio(sum(self.delays), len(self.delays), 2),
            "late_delay_records": round(float(np.quantile(self.delays, 0.95)), 1) if self.delays else None,
            "false_alarms_per_10k": ratio(10_000 * self.false_alarms, self.records, 3),
            "recurrence_recall": ratio(self.recognized, self.returns),
            "novelty_recall": ratio(self.declared_new, self.novelties),
            "record_assignment": ratio(self.assigned, self.mixed_records),
            "single_assignment": ratio(self.singles_assigned, self.singles),
            "us_per_record": ratio(1e6 * self.seconds, self.records, 1),
        }

    def add(self, stream: Stream, assigned: Assigned, classify: Classify | None, tasks: Sequence[Task]) -> None:
        """Count one stream."""
        self.records += len(stream.tasks)
        self.seconds += assigned.seconds
        detected = match(stream, assigned.shifts)
        required = [boundary for boundary in stream.boundaries if boundary.task is not None]
        self.boundaries += len(required)
        self.hits += sum(boundary in detected for boundary in required)
        self.false_alarms += len(assigned.shifts) - 1 - len(detected)
        self.delays += [detected[edge].declared_at - edge.at for edge in required if edge in detected]
        for boundary in required:
            shift = detected.get(boundary)
            if boundary.returns:
                self.returns += 1
                self.recognized += shift is not None and shift.slot == _main_slot(stream, assigned.slots, boundary)
            else:
                self.novelties += 1
                self.declared_new += shift is not None and not shift.known
        if stream.kind not in STATIONARY_KINDS:
            task_of_slot = one_to_one(stream.tasks, assigned.slots)
            self.mixed_records += len(stream.tasks)
            pairs = zip(assigned.slots, stream.tasks, strict=True)
            self.assigned += sum(task_of_slot.get(slot) == task for slot, task in pairs)
            if stream.kind == "abrupt" and classify is not None:
                self._add_single_records(stream, classify, task_of_slot, tasks)

    def _add_single_records(
        self, stream: Stream, classify: Classify, task_of_slot: dict[int, int], tasks: Sequence[Task]
    ) -> None:
        drawn = sorted(zip(stream.tasks, stream.records, strict=True))
        for task, group in groupby(drawn, key=lambda pair: pair[0]):
            examples, used = tasks[task].examples[stream.prompt], {record for _, record in group}
            unseen = [examples[i] for i in range(len(examples)) if i not in used][:MAX_SINGLE_RECORDS]
            self.singles += len(unseen)
            self.singles_assigned += sum(task_of_slot.get(slot) == task for slot in classify(unseen))


def measure(data: Path, *, seeds: int, quick: bool = False) -> dict[str, Any]:
    """Measure every detector on the same streams; `quick` makes short ones."""
    decoder, _ = text_decoder()
    rows = read_folder(data, 60 if quick else None, least=MIN_TASKS)
    tasks = [to_task(name, own, decoder) for name, own in rows.items()]
    streams = [
        stream
        for seed in range(seeds)
        for prompt in PROMPTS
        for stream in StreamMaker(tasks, seed, stationary_records=400 if quick else 10_000).all(prompt)
    ]
    result: dict[str, Any] = {
        name: metrics([(stream, *run(stream, tasks)) for stream in streams], tasks)
        for name, run in detectors(ShiftSettings()).items()
    }
    result["setting"] = {
        "seeds": seeds,
        "tasks": len(tasks),
        "streams": len(streams),
        "records": sum(len(stream.tasks) for stream in streams),
        "found_within_records": WITHIN,
        **ShiftSettings().model_dump(),
    }
    return result


def measure_others(file: Path, seeds: int, *, records: int, length: int, requested: Sequence[float]) -> dict[str, Any]:
    """Measure boundaries between other tasks, and the rate of false alarms at each requested level."""
    tasks, _ = false_alarms.read_tasks(file)
    run = detectors(ShiftSettings())["default"]
    tallies: dict[str, Tally] = {prompt: Tally() for prompt in PROMPTS}
    for stream, subset in false_alarms.boundary_streams(tasks, seeds):
        assigned, _ = run(stream, subset)
        tallies[stream.prompt].add(stream, assigned, None, subset)  # slots are reused: more tasks than regimes
    shown = ("records", "boundaries", "recall", "precision", "mean_delay_records", "late_delay_records")
    return {
        "tasks": len(tasks),
        "boundaries": {prompt: {name: tally.metrics()[name] for name in shown} for prompt, tally in tallies.items()},
        "stream_records": length,
        "level": {f"{level:g}": false_alarms.measure_level(tasks, level, records, length) for level in requested},
    }


def detectors(settings: ShiftSettings) -> dict[str, Run]:
    """Return the daemon's detector, ablations of it, and dummies that ignore the records."""
    return {
        "default": _with_monitor(settings, WINDOW_TESTS),
        "window_16": _with_monitor(settings, _without_window(32)),
        "window_32": _with_monitor(settings, _without_window(16)),
        "always": _dummy(lambda _: True),
        "periodic": _dummy(lambda ordinal: ordinal % PERIOD == 1),
        "never": _dummy(lambda ordinal: ordinal == 1),
    }


def metrics(runs: Sequence[tuple[Stream, Assigned, Classify | None]], tasks: Sequence[Task]) -> dict[str, Any]:
    """Return one detector's headline metrics, and all metrics of each kind of stream."""
    tallies: dict[str, Tally] = {}
    for stream, assigned, classify in runs:
        for name in (stream.kind, f"{stream.kind}_{stream.prompt}"):
            tallies.setdefault(name, Tally()).add(stream, assigned, classify, tasks)
    several = [
        tally for name, tally in tallies.items() if tally.mixed_records and name.endswith(("_definition", "_bare"))
    ]
    kinds = {name: tally.metrics() for name, tally in tallies.items()}
    return {
        **{name: kinds["abrupt"][name] for name in ("recall", "precision", "mean_delay_records")},
        "false_alarms_per_10k": kinds["stationary"]["false_alarms_per_10k"],
        "false_alarms_per_10k_autocorrelated": kinds["autocorrelated"]["false_alarms_per_10k"],
        "recurrence_recall": kinds["recurring"]["recurrence_recall"],
        "record_assignment": ratio(
            sum(tally.assigned for tally in several), sum(tally.mixed_records for tally in several)
        ),
        "single_assignment": kinds["abrupt"]["single_assignment"],
        "us_per_record": ratio(
            1e6 * sum(assigned.seconds for _, assigned, _ in runs), sum(len(stream.tasks) for stream, _, _ in runs), 1
        ),
        "kinds": kinds,
    }


def match(stream: Stream, shifts: Sequence[Shift]) -> dict[Boundary, Shift]:
    """Return the shift that detects each boundary."""
    reach = WITHIN + (RAMP if stream.kind == "gradual" else 0)
    later = shifts[1:]
    starts = [boundary.at for boundary in stream.boundaries]
    hits = matches(starts, len(stream.tasks) + 1, [shift.declared_at for shift in later], reach)
    return {stream.boundaries[boundary]: later[index] for boundary, index in hits.items()}


def table(result: dict[str, Any]) -> Table:
    """Build the table: headline metrics of every detector, then the default detector's on each kind of stream."""
    detectors = {name: row for name, row in result.items() if name not in ("setting", "answers", "others")}
    return grid({**detectors, **result["default"]["kinds"]}, HEADINGS)


def _without_window(n: int) -> list[WindowTest]:
    """Return the tests but those of windows of n records."""
    return [test for test in WINDOW_TESTS if not (isinstance(test, partial) and test.keywords["n"] == n)]


def _with_monitor(settings: ShiftSettings, tests: Sequence[WindowTest]) -> Run:
    def run(stream: Stream, tasks: Sequence[Task]) -> tuple[Assigned, Classify]:
        monitor = Monitor(settings, seed=0, tests=tests)
        assigned = run_monitor(monitor, list(stream.examples(tasks)))
        monitor.trained = monitor.state

        def classify(examples: Sequence[Example]) -> list[int]:
            return [one.slot for one in monitor.assign([input_of(example) for example in examples])]

        return assigned, classify

    return run


def _dummy(declares: Callable[[int], bool]) -> Run:
    """A detector that ignores the records and declares a new regime at some ordinals."""

    def run(stream: Stream, tasks: Sequence[Task]) -> tuple[Assigned, None]:
        del tasks
        at = [ordinal for ordinal in range(1, len(stream.tasks) + 1) if declares(ordinal)]
        shifts = [
            Shift("inputs", i + 1, i + 1, i, False, i or None, ordinal, ordinal, 0.0, 0.0)
            for i, ordinal in enumerate(at)
        ]
        lengths = np.diff([*at, len(stream.tasks) + 1]).tolist()
        return Assigned(shifts, [slot for slot, length in enumerate(lengths) for _ in range(length)], 0.0), None

    return run


def _main_slot(stream: Stream, slots: Sequence[int], boundary: Boundary) -> int | None:
    """The slot of most of the task's records before the boundary."""
    before = boundary.at - 1
    pairs = zip(slots[:before], stream.tasks[:before], strict=True)
    counts = Counter(slot for slot, task in pairs if task == boundary.task)
    return counts.most_common(1)[0][0] if counts else None


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, default=SHARED / "superni", help="folder of SuperNI task files")
    options.add_argument("--seeds", type=int, default=5, help="streams of each kind and prompt, one per seed")
    options.add_argument("--quick", action="store_true", help="use short streams of few records, as a smoke test")
    options.add_argument(
        "--answers", action=argparse.BooleanOptionalAction, default=True,
        help="also train on tasks with exchanged labels, which takes minutes",
    )  # fmt: skip
    options.add_argument("--others", type=Path, help="also measure on the texts of other tasks in this file")
    options.add_argument("--records", type=int, default=100_000, help="with --others: stationary records of each order")
    options.add_argument("--length", type=int, default=1000, help="with --others: records of one stationary stream")
    options.add_argument(
        "--level", type=float, nargs="+", default=[1.0], help="with --others: false alarms per million"
    )
    given = options.parse_args()
    result = measure(given.data, seeds=given.seeds, quick=given.quick)
    if given.others is not None:
        length = min(given.length, given.records)
        result["others"] = measure_others(
            given.others, given.seeds, records=given.records, length=length, requested=given.level
        )
    tables = [table(result)]
    if given.answers:
        result["answers"] = concept.measure_all(
            given.data, range(1 if given.quick else min(given.seeds, CONCEPT_SEEDS))
        )
        tables.append(concept.table(result["answers"]))
    show(result, *tables, as_json=given.json, width=TABLE_WIDTH)


if __name__ == "__main__":
    command(main)
