"""How well shifts of the inputs are found: delay, misses, false alarms, and whose regime each record is given.

    streamlearn bench detect --json

Streams of real tasks (`bench/streams.py`), with the definition in the prompt and bare. A shift that is declared within
`WITHIN` records of a boundary (behind the ramp, where the change is gradual) and before the next one finds it; every
other shift but the first is a false alarm, except that a producer's leaving may be declared and need not be. Figures:

- recall, precision, mean_delay_records: of boundaries and shifts; the delay counts from the boundary's first record;
- false_alarms_per_10k: shifts in streams that never change, per 10,000 records, in random order and autocorrelated;
- recurrence_recall: returns that were found and called by the regime that most of the task's earlier records got;
- novelty_recall: new tasks that were found and called new;
- record_assignment: records in their own task's regime, tasks and regimes matched one to one as well as possible;
- single_assignment: the same for records that were not in the stream, each asked alone.

The first figures of a detector are those of the abrupt streams, `recurrence_recall` of the recurring,
`record_assignment` of all with several tasks. Below stand all figures of each kind of stream. Under `answers` stand
shifts of the answers, learned for real (`bench/concept.py`).
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

from streamlearn.bench import concept
from streamlearn.bench.streams import PROMPTS, RAMP, Boundary, Maker, Stream, Task, read_tasks
from streamlearn.settings import ShiftSettings
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.input_shift_detector import InputShiftDetector
from streamlearn.shift.monitor import Monitor
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example

WITHIN = 64
PERIOD = 200
BATCH_RECORDS = 8
SINGLES = 40
"""Records of each task that are asked alone."""
STILL = ("stationary", "autocorrelated")
TABLE_WIDTH = 120
ANSWERS_SEEDS = 3  # each is six runs of a daemon, a minute long
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
"""The table's columns; the module's docstring says what they are."""

Run = Callable[[Stream, Sequence[Task]], "Found"]


@dataclass
class Found:
    """What a detector made of a stream."""

    shifts: list[Shift]
    slots: list[int]
    seconds: float
    singles: Callable[[Sequence[Example]], list[int]] | None = None


@dataclass
class Tally:
    """Counts over streams, added up before any quotient is taken."""

    records: int = 0
    seconds: float = 0.0
    boundaries: int = 0
    hits: int = 0
    false_alarms: int = 0
    delays: list[int] = field(default_factory=list)
    returns: int = 0
    recognised: int = 0
    novelties: int = 0
    called_new: int = 0
    mixed_records: int = 0
    assigned: int = 0
    singles: int = 0
    singles_assigned: int = 0

    def figures(self) -> dict[str, float | None]:
        """The quotients; None where there was nothing to count."""
        return {
            "records": self.records,
            "boundaries": self.boundaries,
            "recall": _ratio(self.hits, self.boundaries),
            "precision": _ratio(self.hits, self.hits + self.false_alarms),
            "mean_delay_records": _ratio(sum(self.delays), len(self.delays), 2),
            "late_delay_records": round(float(np.quantile(self.delays, 0.95)), 1) if self.delays else None,
            "false_alarms_per_10k": _ratio(10_000 * self.false_alarms, self.records, 3),
            "recurrence_recall": _ratio(self.recognised, self.returns),
            "novelty_recall": _ratio(self.called_new, self.novelties),
            "record_assignment": _ratio(self.assigned, self.mixed_records),
            "single_assignment": _ratio(self.singles_assigned, self.singles),
            "us_per_record": _ratio(1e6 * self.seconds, self.records, 1),
        }


def report(*, data: Path, seeds: int, as_json: bool, quick: bool = False, answers: bool = True) -> None:
    """Measure every detector on the same streams and print the figures.

    `quick` takes short streams; `answers` also learns tasks whose labels are exchanged, which takes twenty minutes.
    """
    result = measure(data, seeds=seeds, quick=quick)
    if answers:
        result["answers"] = concept.measure_all(data, range(1 if quick else min(seeds, ANSWERS_SEEDS)))
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())  # noqa: T201 - JSON goes out as it is
    else:
        console = Console(width=TABLE_WIDTH)
        console.print(table(result))
        if answers:
            console.print(concept.table(result["answers"]))


def measure(data: Path, *, seeds: int, quick: bool = False) -> dict[str, Any]:
    """Every detector's figures, and under `setting` what they were measured on."""
    tasks, vocab_size = read_tasks(data, limit=60 if quick else None)
    streams = [
        stream
        for seed in range(seeds)
        for prompt in PROMPTS
        for stream in Maker(tasks, seed, stationary_records=400 if quick else 10_000).all(prompt)
    ]
    result: dict[str, Any] = {
        name: figures([(stream, run(stream, tasks)) for stream in streams], tasks)
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


def detectors(settings: ShiftSettings, vocab_size: int) -> dict[str, Run]:
    """The daemon's detector, parts of it alone, and dummies that look at nothing."""
    watches = {
        "default": lambda: InputShiftDetector(settings),
        "mixture_is_a_regime": lambda: InputShiftDetector(settings, single=False),
        "window_16": lambda: InputShiftDetector(settings, windows=(16,), single=False),
        "window_32": lambda: InputShiftDetector(settings, windows=(32,), single=False),
        "independent_records": lambda: InputShiftDetector(settings, serial=False, single=False),
    }
    return {
        **{name: _watching(settings, vocab_size, build) for name, build in watches.items()},
        "always": _dummy(lambda _: True),
        "periodic": _dummy(lambda ordinal: ordinal % PERIOD == 1),
        "never": _dummy(lambda ordinal: ordinal == 1),
    }


def figures(found: Sequence[tuple[Stream, Found]], tasks: Sequence[Task]) -> dict[str, Any]:
    """One detector's figures: the first ones, and all of each kind of stream."""
    tallies: dict[str, Tally] = {}
    for stream, each in found:
        for name in (stream.kind, f"{stream.kind}_{stream.prompt}"):
            count(tallies.setdefault(name, Tally()), stream, each, tasks)
    several = [
        tally for name, tally in tallies.items() if (tally.mixed_records and "_definition" in name) or "_bare" in name
    ]
    kinds = {name: tally.figures() for name, tally in tallies.items()}
    first = ("recall", "precision", "mean_delay_records")
    return {
        **{name: kinds["abrupt"][name] for name in first},
        "false_alarms_per_10k": kinds["stationary"]["false_alarms_per_10k"],
        "false_alarms_per_10k_autocorrelated": kinds["autocorrelated"]["false_alarms_per_10k"],
        "recurrence_recall": kinds["recurring"]["recurrence_recall"],
        "record_assignment": _ratio(
            sum(tally.assigned for tally in several), sum(tally.mixed_records for tally in several)
        ),
        "single_assignment": kinds["abrupt"]["single_assignment"],
        "us_per_record": _ratio(
            1e6 * sum(each.seconds for _, each in found), sum(len(stream.tasks) for stream, _ in found), 1
        ),
        "kinds": kinds,
    }


def count(tally: Tally, stream: Stream, found: Found, tasks: Sequence[Task]) -> None:
    """Add one stream."""
    tally.records += len(stream.tasks)
    tally.seconds += found.seconds
    matched = match(stream, found.shifts)
    wanted = [boundary for boundary in stream.boundaries if boundary.task is not None]
    tally.boundaries += len(wanted)
    tally.hits += sum(boundary in matched for boundary in wanted)
    tally.false_alarms += len(found.shifts) - 1 - len(matched)
    tally.delays += [matched[each].declared_at - each.at for each in wanted if each in matched]
    for boundary in wanted:
        shift = matched.get(boundary)
        if boundary.returns:
            tally.returns += 1
            tally.recognised += shift is not None and shift.slot == _usual_slot(stream, found.slots, boundary)
        else:
            tally.novelties += 1
            tally.called_new += shift is not None and not shift.known
    if stream.kind not in STILL:
        owners = assignment(stream.tasks, found.slots)
        tally.mixed_records += len(stream.tasks)
        tally.assigned += sum(owners.get(slot) == task for slot, task in zip(found.slots, stream.tasks, strict=True))
        if stream.kind == "abrupt" and found.singles is not None:
            _ask_singles(tally, stream, found.singles, owners, tasks)


def match(stream: Stream, shifts: Sequence[Shift]) -> dict[Boundary, Shift]:
    """The first shift within reach of each boundary."""
    matched = {}
    reach = WITHIN + (RAMP if stream.kind == "gradual" else 0)
    left = list(shifts[1:])
    starts = [boundary.at for boundary in stream.boundaries] + [len(stream.tasks) + 1]
    for boundary, end in zip(stream.boundaries, starts[1:], strict=True):
        last = min(boundary.at + reach, end)
        hit = next((shift for shift in left if boundary.at <= shift.declared_at < last), None)
        if hit is not None:
            matched[boundary] = hit
            left.remove(hit)
    return matched


def assignment(tasks: Sequence[int], slots: Sequence[int]) -> dict[int, int]:
    """The task of each slot, one to one, so that as many records as possible are in their task's."""
    counts = np.zeros((max(slots) + 1, max(tasks) + 1))
    np.add.at(counts, (np.array(slots), np.array(tasks)), 1)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return {slot: task for slot, task in zip(rows.tolist(), columns.tolist(), strict=True) if counts[slot, task] > 0}


def table(result: dict[str, Any]) -> Table:
    """The first figures of every detector, then every kind of stream of the daemon's own."""
    shown = Table("", *HEADINGS.values(), box=None, pad_edge=False)
    for detector in (name for name in result if name not in ("setting", "answers")):
        shown.add_row(detector, *(_cell(result[detector].get(name)) for name in HEADINGS))
    shown.add_row()
    for kind, found in result["default"]["kinds"].items():
        shown.add_row(kind, *(_cell(found.get(name)) for name in HEADINGS))
    return shown


def _watching(settings: ShiftSettings, vocab_size: int, build: Callable[[], InputShiftDetector]) -> Run:
    def run(stream: Stream, tasks: Sequence[Task]) -> Found:
        monitor = Monitor(settings, vocab_size, seed=0, watch=build())
        examples = list(stream.examples(tasks))
        batches = [
            Batch((), tuple(examples[start : start + BATCH_RECORDS]))
            for start in range(0, len(examples), BATCH_RECORDS)
        ]
        assigned: list[AssignedBatch] = []
        started = time.process_time()  # of this process alone: others share the cores
        for batch in batches:
            assigned += monitor.update(batch)
        assigned += monitor.flush()
        seconds = time.process_time() - started
        return Found(
            [shift for each in assigned for shift in each.shifts],
            [slot for each in assigned for slot in each.slots],
            seconds,
            lambda singles: monitor.assign([each.input_ids[: each.prompt_length] for each in singles]),
        )

    return run


def _dummy(declares: Callable[[int], bool]) -> Run:
    """Declares without looking; what it declares is always new."""

    def run(stream: Stream, tasks: Sequence[Task]) -> Found:
        del tasks
        at = [ordinal for ordinal in range(1, len(stream.tasks) + 1) if declares(ordinal)]
        shifts = [
            Shift("inputs", i + 1, i + 1, i, False, i or None, ordinal, ordinal, 0.0, 0.0)
            for i, ordinal in enumerate(at)
        ]
        lengths = np.diff([*at, len(stream.tasks) + 1]).tolist()
        slots = [slot for slot, length in enumerate(lengths) for _ in range(length)]
        return Found(shifts, slots, 0.0)

    return run


def _usual_slot(stream: Stream, slots: Sequence[int], boundary: Boundary) -> int | None:
    """Where most of the task's records went before the boundary."""
    before = boundary.at - 1
    pairs = zip(slots[:before], stream.tasks[:before], strict=True)
    counts = Counter(slot for slot, task in pairs if task == boundary.task)
    return counts.most_common(1)[0][0] if counts else None


def _ask_singles(
    tally: Tally,
    stream: Stream,
    assign: Callable[[Sequence[Example]], list[int]],
    owners: dict[int, int],
    tasks: Sequence[Task],
) -> None:
    used = {
        task: {record for _, record in group}
        for task, group in groupby(sorted(zip(stream.tasks, stream.records, strict=True)), key=lambda pair: pair[0])
    }
    for task, records in used.items():
        examples = tasks[task].examples[stream.prompt]
        unseen = [examples[i] for i in range(len(examples)) if i not in records][:SINGLES]
        tally.singles += len(unseen)
        tally.singles_assigned += sum(owners.get(slot) == task for slot in assign(unseen))


def _ratio(part: float, whole: float, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole else None


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
