"""Benchmark of input shift detection: delay, misses, false alarms and the assignment of records to regimes.

    streamlearn bench detect --json

The streams consist of real tasks (`bench/streams.py`), with and without the definition in the prompt. A shift that is
declared within `WITHIN` records of a boundary (of the end of the ramp, where the change is gradual) and before the next
boundary detects it. Every other shift except the first is a false alarm; a shift when a producer leaves is optional and
counts neither way. The metrics:

- recall, precision, mean_delay_records: of boundaries and shifts; the delay is counted from the boundary's first record
- false_alarms_per_10k: shifts per 10,000 records in streams that never change, in random order and autocorrelated
- recurrence_recall: returns detected and assigned to the regime that received most of the task's earlier records
- novelty_recall: new tasks detected and declared new
- record_assignment: records in the regime of their task, under the best one-to-one matching of tasks and regimes
- single_assignment: the same for records that were not in the stream, each classified by itself

`--others` adds streams of other tasks, and false alarms beside the asked level (`bench/detect_others.py`).

A detector's headline metrics come from the abrupt streams; `recurrence_recall` comes from the recurring streams and
`record_assignment` from all streams of several tasks. `kinds` holds all metrics of each kind of stream, and `answers`
holds shifts of the answers in real training (`bench/concept.py`).
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment

from benchmarks import concept, detect_others
from benchmarks.matches import matches
from benchmarks.streams import PROMPTS, RAMP, Boundary, Maker, Stream, Task, read_tasks
from streamlearn.settings import ShiftSettings
from streamlearn.shift.input_shift import InputShiftDetector, Shift
from streamlearn.shift.monitor import AssignedBatch, Monitor
from streamlearn.stream.record import Batch, Example

WITHIN = 64
PERIOD = 200
BATCH_RECORDS = 8
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

Run = Callable[[Stream, Sequence[Task]], "Detection"]


@dataclass
class Detection:
    """A detector's output on a stream."""

    shifts: list[Shift]
    slots: list[int]
    seconds: float
    assign: Callable[[Sequence[Example]], list[int]] | None = None
    """Slots of records outside the stream, each classified by itself."""


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
        """The ratios; None where the denominator is 0."""
        return {
            "records": self.records,
            "boundaries": self.boundaries,
            "recall": _ratio(self.hits, self.boundaries),
            "precision": _ratio(self.hits, self.hits + self.false_alarms),
            "mean_delay_records": _ratio(sum(self.delays), len(self.delays), 2),
            "late_delay_records": round(float(np.quantile(self.delays, 0.95)), 1) if self.delays else None,
            "false_alarms_per_10k": _ratio(10_000 * self.false_alarms, self.records, 3),
            "recurrence_recall": _ratio(self.recognized, self.returns),
            "novelty_recall": _ratio(self.declared_new, self.novelties),
            "record_assignment": _ratio(self.assigned, self.mixed_records),
            "single_assignment": _ratio(self.singles_assigned, self.singles),
            "us_per_record": _ratio(1e6 * self.seconds, self.records, 1),
        }


@dataclass(frozen=True)
class Others:
    """What is measured on other tasks."""

    file: Path
    records: int
    """Stationary records of each order."""
    stream_records: int
    """Of them, records of one stream."""
    asked: tuple[float, ...]
    """Levels, false alarms per million records."""


def report(
    *, data: Path, seeds: int, as_json: bool, quick: bool = False, answers: bool = True, others: Others | None = None
) -> None:
    """Measure every detector on the same streams and print the metrics.

    `quick` uses short streams. `answers` also trains on tasks whose labels are exchanged, which takes twenty minutes.
    """
    result = measure(data, seeds=seeds, quick=quick)
    if others is not None:
        result["others"] = measure_others(others, seeds)
    if answers:
        result["answers"] = concept.measure_all(data, range(1 if quick else min(seeds, CONCEPT_SEEDS)))
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        console = Console(width=TABLE_WIDTH)
        console.print(table(result))
        if answers:
            console.print(concept.table(result["answers"]))


def measure(data: Path, *, seeds: int, quick: bool = False) -> dict[str, Any]:
    """The metrics of every detector, and under `setting` what they were measured on."""
    tasks, vocab_size = read_tasks(data, limit=60 if quick else None)
    streams = [
        stream
        for seed in range(seeds)
        for prompt in PROMPTS
        for stream in Maker(tasks, seed, stationary_records=400 if quick else 10_000).all(prompt)
    ]
    result: dict[str, Any] = {
        name: metrics([(stream, run(stream, tasks)) for stream in streams], tasks)
        for name, run in detectors(ShiftSettings(), vocab_size).items()
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


def measure_others(others: Others, seeds: int) -> dict[str, Any]:
    """Boundaries between other tasks, and the rate of false alarms at each asked level."""
    tasks, vocab_size = detect_others.read_tasks(others.file)
    run = detectors(ShiftSettings(), vocab_size)["default"]
    tallies: dict[str, Tally] = {prompt: Tally() for prompt in PROMPTS}
    for stream, subset in detect_others.boundary_streams(tasks, seeds):
        detection = run(stream, subset)
        detection.assign = None  # slots are reused: there are more tasks than regimes remembered
        count(tallies[stream.prompt], stream, detection, subset)
    shown = ("records", "boundaries", "recall", "precision", "mean_delay_records", "late_delay_records")
    return {
        "tasks": len(tasks),
        "boundaries": {prompt: {name: tally.metrics()[name] for name in shown} for prompt, tally in tallies.items()},
        "stream_records": others.stream_records,
        "level": {
            f"{asked:g}": detect_others.measure_level(tasks, asked, others.records, others.stream_records)
            for asked in others.asked
        },
    }


def detectors(settings: ShiftSettings, vocab_size: int) -> dict[str, Run]:
    """The daemon's detector, ablations of it, and dummies that ignore the records."""
    builds = {
        "default": lambda: InputShiftDetector(settings),
        "mixture_is_a_regime": lambda: InputShiftDetector(settings, per_record=False),
        "window_16": lambda: InputShiftDetector(settings, windows=(16,), per_record=False),
        "window_32": lambda: InputShiftDetector(settings, windows=(32,), per_record=False),
        "independent_records": lambda: InputShiftDetector(settings, serial_correlation=False, per_record=False),
    }
    return {
        **{name: _with_monitor(settings, vocab_size, build) for name, build in builds.items()},
        "always": _dummy(lambda _: True),
        "periodic": _dummy(lambda ordinal: ordinal % PERIOD == 1),
        "never": _dummy(lambda ordinal: ordinal == 1),
    }


def metrics(runs: Sequence[tuple[Stream, Detection]], tasks: Sequence[Task]) -> dict[str, Any]:
    """One detector's headline metrics, and all metrics of each kind of stream."""
    tallies: dict[str, Tally] = {}
    for stream, detection in runs:
        for name in (stream.kind, f"{stream.kind}_{stream.prompt}"):
            count(tallies.setdefault(name, Tally()), stream, detection, tasks)
    several = [each for name, each in tallies.items() if each.mixed_records and name.endswith(("_definition", "_bare"))]
    kinds = {name: tally.metrics() for name, tally in tallies.items()}
    headline = ("recall", "precision", "mean_delay_records")
    return {
        **{name: kinds["abrupt"][name] for name in headline},
        "false_alarms_per_10k": kinds["stationary"]["false_alarms_per_10k"],
        "false_alarms_per_10k_autocorrelated": kinds["autocorrelated"]["false_alarms_per_10k"],
        "recurrence_recall": kinds["recurring"]["recurrence_recall"],
        "record_assignment": _ratio(
            sum(tally.assigned for tally in several), sum(tally.mixed_records for tally in several)
        ),
        "single_assignment": kinds["abrupt"]["single_assignment"],
        "us_per_record": _ratio(
            1e6 * sum(each.seconds for _, each in runs), sum(len(stream.tasks) for stream, _ in runs), 1
        ),
        "kinds": kinds,
    }


def count(tally: Tally, stream: Stream, detection: Detection, tasks: Sequence[Task]) -> None:
    """Add one stream to the tally."""
    tally.records += len(stream.tasks)
    tally.seconds += detection.seconds
    matched = match(stream, detection.shifts)
    required = [boundary for boundary in stream.boundaries if boundary.task is not None]
    tally.boundaries += len(required)
    tally.hits += sum(boundary in matched for boundary in required)
    tally.false_alarms += len(detection.shifts) - 1 - len(matched)
    tally.delays += [matched[each].declared_at - each.at for each in required if each in matched]
    for boundary in required:
        shift = matched.get(boundary)
        if boundary.returns:
            tally.returns += 1
            tally.recognized += shift is not None and shift.slot == _main_slot(stream, detection.slots, boundary)
        else:
            tally.novelties += 1
            tally.declared_new += shift is not None and not shift.known
    if stream.kind not in STATIONARY_KINDS:
        task_of_slot = assignment(stream.tasks, detection.slots)
        tally.mixed_records += len(stream.tasks)
        pairs = zip(detection.slots, stream.tasks, strict=True)
        tally.assigned += sum(task_of_slot.get(slot) == task for slot, task in pairs)
        if stream.kind == "abrupt" and detection.assign is not None:
            _count_single_records(tally, stream, detection.assign, task_of_slot, tasks)


def match(stream: Stream, shifts: Sequence[Shift]) -> dict[Boundary, Shift]:
    """The shift that detects each boundary."""
    reach = WITHIN + (RAMP if stream.kind == "gradual" else 0)
    later = shifts[1:]
    starts = [boundary.at for boundary in stream.boundaries]
    found = matches(starts, len(stream.tasks) + 1, [shift.declared_at for shift in later], reach)
    return {stream.boundaries[boundary]: later[index] for boundary, index in found.items()}


def assignment(tasks: Sequence[int], slots: Sequence[int]) -> dict[int, int]:
    """The task of each slot, one to one, such that as many records as possible are in the slot of their task."""
    counts = np.zeros((max(slots) + 1, max(tasks) + 1))
    np.add.at(counts, (np.array(slots), np.array(tasks)), 1)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return {slot: task for slot, task in zip(rows.tolist(), columns.tolist(), strict=True) if counts[slot, task] > 0}


def table(result: dict[str, Any]) -> Table:
    """The headline metrics of every detector, then the default detector's on each kind of stream."""
    shown = Table("", *HEADINGS.values(), box=None, pad_edge=False)
    for detector in (name for name in result if name not in ("setting", "answers", "others")):
        shown.add_row(detector, *(_cell(result[detector].get(name)) for name in HEADINGS))
    shown.add_row()
    for kind, values in result["default"]["kinds"].items():
        shown.add_row(kind, *(_cell(values.get(name)) for name in HEADINGS))
    return shown


def _with_monitor(settings: ShiftSettings, vocab_size: int, build: Callable[[], InputShiftDetector]) -> Run:
    def run(stream: Stream, tasks: Sequence[Task]) -> Detection:
        monitor = Monitor(settings, vocab_size, seed=0, detector=build())
        examples = list(stream.examples(tasks))
        batches = [
            Batch((), tuple(examples[start : start + BATCH_RECORDS]))
            for start in range(0, len(examples), BATCH_RECORDS)
        ]
        assigned: list[AssignedBatch] = []
        started = time.process_time()  # CPU time of this process: others share the cores
        for batch in batches:
            assigned += monitor.update(batch)
        assigned += monitor.flush()
        seconds = time.process_time() - started
        return Detection(
            [shift for each in assigned for shift in each.shifts],
            [slot for each in assigned for slot in each.slots],
            seconds,
            lambda records: [
                assigned.slot for assigned in monitor.assign([each.input_ids[: each.prompt_length] for each in records])
            ],
        )

    return run


def _dummy(declares: Callable[[int], bool]) -> Run:
    """A detector that ignores the records and declares a new regime at some ordinals."""

    def run(stream: Stream, tasks: Sequence[Task]) -> Detection:
        del tasks
        at = [ordinal for ordinal in range(1, len(stream.tasks) + 1) if declares(ordinal)]
        shifts = [
            Shift("inputs", i + 1, i + 1, i, False, i or None, ordinal, ordinal, 0.0, 0.0)
            for i, ordinal in enumerate(at)
        ]
        lengths = np.diff([*at, len(stream.tasks) + 1]).tolist()
        slots = [slot for slot, length in enumerate(lengths) for _ in range(length)]
        return Detection(shifts, slots, 0.0)

    return run


def _main_slot(stream: Stream, slots: Sequence[int], boundary: Boundary) -> int | None:
    """The slot of most of the task's records before the boundary."""
    before = boundary.at - 1
    pairs = zip(slots[:before], stream.tasks[:before], strict=True)
    counts = Counter(slot for slot, task in pairs if task == boundary.task)
    return counts.most_common(1)[0][0] if counts else None


def _count_single_records(
    tally: Tally,
    stream: Stream,
    assign: Callable[[Sequence[Example]], list[int]],
    task_of_slot: dict[int, int],
    tasks: Sequence[Task],
) -> None:
    used = {
        task: {record for _, record in group}
        for task, group in groupby(sorted(zip(stream.tasks, stream.records, strict=True)), key=lambda pair: pair[0])
    }
    for task, records in used.items():
        examples = tasks[task].examples[stream.prompt]
        unseen = [examples[i] for i in range(len(examples)) if i not in records][:MAX_SINGLE_RECORDS]
        tally.singles += len(unseen)
        tally.singles_assigned += sum(task_of_slot.get(slot) == task for slot in assign(unseen))


def _ratio(part: float, whole: float, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole else None


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
