"""Detection of shifts: delay, misses, false alarms and the assignment of records to regimes.

    python -m benchmarks.detect --json
    python -m benchmarks.detect others --records 500000 --level 10 --json

| measurement | what it measures |
|---|---|
| shifts | boundaries between tasks, see below; the default |
| answers | shifts of the answers in real training, see `concept`; takes minutes |
| mixtures | producers that are in the stream from its first record, see `assignment` |
| requests | requests of tasks that were not in the stream, see `assignment` |
| others | boundaries between other tasks, and the rate of false alarms on them, see `false_alarms` |

The streams consist of real tasks (`streams`), with and without the definition in the prompt. A shift that is declared
within `WITHIN` records of a boundary (of the end of the ramp, where the change is gradual) and before the next boundary
detects it. Every other shift except the first is a false alarm; a shift when a producer leaves is optional and counts
neither way. The metrics:

- recall, precision, mean_delay_records: of boundaries and shifts; the delay is counted from the boundary's first record
- false_alarms_per_10k: shifts per 10,000 records in streams that never change, in random order and autocorrelated
- recurrence_recall: returns detected and assigned to the regime that received most of the task's earlier records
- record_assignment: records in the regime of their task, under the best one-to-one matching of tasks and regimes

A detector's headline metrics come from the abrupt streams; `recurrence_recall` comes from the recurring streams and
`record_assignment` from all streams of several tasks.
`kinds` holds all metrics of each kind of stream.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks import assignment, concept, false_alarms
from benchmarks.measuring import OTHERS, SHARED, command, grid, parser, positive, positive_float, show
from benchmarks.streams import (
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
    read_others,
    run_monitor,
    text_featurizer,
    to_tasks,
)
from streamlearn.settings import ShiftSettings, StreamSettings
from streamlearn.shift.change_tests import WINDOW_TESTS, WindowTest
from streamlearn.shift.detector import Shift
from streamlearn.shift.monitor import Monitor

WITHIN = 64
PERIOD = 200
TABLE_WIDTH = 120
STATIONARY_KINDS = ("stationary", "autocorrelated")
HEADINGS = {
    "recall": "found",
    "precision": "right",
    "mean_delay_records": "delay",
    "false_alarms_per_10k": "FA/10k",
    "false_alarms_per_10k_autocorrelated": "auto.",
    "recurrence_recall": "recur.",
    "record_assignment": "assign.",
    "us_per_record": "us",
}
"""Columns of the table, described in the module's docstring."""

Run = Callable[[Stream, Sequence[Task]], Assigned]


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
    mixed_records: int = 0
    assigned: int = 0

    def metrics(self) -> dict[str, float | None]:
        return {
            "records": self.records,
            "boundaries": self.boundaries,
            "recall": ratio(self.hits, self.boundaries),
            "precision": ratio(self.hits, self.hits + self.false_alarms),
            "mean_delay_records": ratio(sum(self.delays), len(self.delays), 2),
            "false_alarms_per_10k": ratio(10_000 * self.false_alarms, self.records, 3),
            "recurrence_recall": ratio(self.recognized, self.returns),
            "record_assignment": ratio(self.assigned, self.mixed_records),
            "us_per_record": ratio(1e6 * self.seconds, self.records, 1),
        }

    def add(self, stream: Stream, assigned: Assigned) -> None:
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
        if stream.kind not in STATIONARY_KINDS:
            task_of_slot = one_to_one(stream.tasks, assigned.slots)
            self.mixed_records += len(stream.tasks)
            pairs = zip(assigned.slots, stream.tasks, strict=True)
            self.assigned += sum(task_of_slot.get(slot) == task for slot, task in pairs)


def measure(data: Path, *, seeds: int, quick: bool = False, max_tokens: int = 1024) -> dict[str, Any]:
    """Measure every detector on the same streams, with records cut to `max_tokens`; `quick` makes short ones."""
    tasks = to_tasks(read_folder(data, 60 if quick else None), stream=StreamSettings(max_tokens=max_tokens))
    streams = [
        stream
        for seed in range(seeds)
        for prompt in PROMPTS
        for stream in StreamMaker(tasks, seed, stationary_records=400 if quick else 10_000).all(prompt)
    ]
    result: dict[str, Any] = {
        name: metrics([(stream, run(stream, tasks)) for stream in streams])
        for name, run in detectors(ShiftSettings()).items()
    }
    result["setting"] = {
        "seeds": seeds,
        "tasks": len(tasks),
        "streams": len(streams),
        "records": sum(len(stream.tasks) for stream in streams),
        "found_within_records": WITHIN,
        "max_tokens": max_tokens,
        **ShiftSettings().model_dump(),
    }
    return result


def measure_others(file: Path, seeds: int, *, records: int, length: int, levels: Sequence[float]) -> dict[str, Any]:
    """Measure boundaries between other tasks, and the rate of false alarms at each level."""
    tasks = to_tasks(read_others(file, false_alarms.MIN_RECORDS))
    run = detectors(ShiftSettings())["default"]
    tallies: dict[str, Tally] = {prompt: Tally() for prompt in PROMPTS}
    for stream, subset in false_alarms.boundary_streams(tasks, seeds):
        tallies[stream.prompt].add(stream, run(stream, subset))
    shown = ("records", "boundaries", "recall", "precision", "mean_delay_records")
    return {
        "tasks": len(tasks),
        "boundaries": {prompt: {name: tally.metrics()[name] for name in shown} for prompt, tally in tallies.items()},
        "stream_records": length,
        "level": {f"{level:g}": false_alarms.measure_level(tasks, level, records, length) for level in levels},
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


def metrics(runs: Sequence[tuple[Stream, Assigned]]) -> dict[str, Any]:
    """Return one detector's headline metrics, and all metrics of each kind of stream."""
    tallies: dict[str, Tally] = {}
    for stream, assigned in runs:
        for name in (stream.kind, f"{stream.kind}_{stream.prompt}"):
            tallies.setdefault(name, Tally()).add(stream, assigned)
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
        "us_per_record": ratio(
            1e6 * sum(assigned.seconds for _, assigned in runs), sum(len(stream.tasks) for stream, _ in runs), 1
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


def _without_window(n: int) -> list[WindowTest]:
    """Return the tests but those of windows of n records."""
    return [test for test in WINDOW_TESTS if not (isinstance(test, partial) and test.keywords["n"] == n)]


def _with_monitor(settings: ShiftSettings, tests: Sequence[WindowTest]) -> Run:
    return lambda stream, tasks: run_monitor(
        Monitor(settings, text_featurizer(), tests=tests), list(stream.examples(tasks))
    )


def _dummy(declares: Callable[[int], bool]) -> Run:
    """A detector that ignores the records and declares a new regime at some ordinals."""

    def run(stream: Stream, tasks: Sequence[Task]) -> Assigned:
        del tasks
        at = [ordinal for ordinal in range(1, len(stream.tasks) + 1) if declares(ordinal)]
        shifts = [
            Shift("inputs", i + 1, i + 1, i, False, i or None, ordinal, ordinal, 0.0, 0.0)
            for i, ordinal in enumerate(at)
        ]
        lengths = np.diff([*at, len(stream.tasks) + 1]).tolist()
        return Assigned(shifts, [slot for slot, length in enumerate(lengths) for _ in range(length)], 0.0)

    return run


def _main_slot(stream: Stream, slots: Sequence[int], boundary: Boundary) -> int | None:
    """The slot of most of the task's records before the boundary."""
    before = boundary.at - 1
    pairs = zip(slots[:before], stream.tasks[:before], strict=True)
    counts = Counter(slot for slot, task in pairs if task == boundary.task)
    return counts.most_common(1)[0][0] if counts else None


MEASUREMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "shifts": lambda given: measure(given.data, seeds=given.seeds, quick=given.quick, max_tokens=given.max_tokens),
    "answers": lambda given: concept.measure_all(given.data, range(given.seeds)),
    "mixtures": lambda given: assignment.measure_mixtures(given.data, given.others, seeds=given.seeds),
    "requests": lambda given: assignment.measure_requests(given.data, given.others, given.backbone),
    "others": lambda given: measure_others(
        given.others, given.seeds, records=given.records, length=given.length, levels=given.level
    ),
}


def table(measurement: str, result: dict[str, Any]) -> Table:
    """Build the table of a measurement: a row by detector, task, or prompt and stream."""
    if measurement == "shifts":
        detectors = {name: row for name, row in result.items() if name != "setting"}
        return grid({**detectors, **result["default"]["kinds"]}, HEADINGS)
    if measurement == "answers":
        return grid(result, tuple(next(iter(result.values()), {})), "answers exchanged")
    if measurement == "others":
        rows = {f"{level}: {order}": row for level, rows in result["level"].items() for order, row in rows.items()}
        shown = ("records", "boundaries", "recall", "precision", "mean_delay_records", "alarms", "per_million")
        return grid({**result["boundaries"], **rows}, (*shown, "interval_95"), "prompt, level and order")
    rows = {f"{prompt} {name}": values for prompt in PROMPTS for name, values in result[prompt].items()}
    columns = assignment.MIXTURE_COLUMNS if measurement == "mixtures" else assignment.REQUEST_COLUMNS
    return grid(rows, columns, "prompt and stream")


def main() -> None:
    options = parser(__doc__)
    add = options.add_argument
    add("measurement", nargs="?", choices=list(MEASUREMENTS), default="shifts")
    add("--data", type=Path, default=SHARED / "superni", help="folder of SuperNI task files")
    add("--others", type=Path, default=OTHERS, help="file of texts of other tasks")
    add("--backbone", type=Path, help="requests: folder of a model whose tokenizer is used, by default nano")
    add("--seeds", type=positive, default=5, help="streams of each kind and prompt, or runs of each task, one per seed")
    add("--quick", action="store_true", help="shifts: use short streams of few records, as a smoke test")
    add("--max-tokens", type=positive, default=1024, help="shifts: stream.max_tokens")
    add("--records", type=positive, default=100_000, help="others: stationary records of each order")
    add("--length", type=positive, default=1000, help="others: records of one stationary stream")
    add("--level", type=positive_float, nargs="+", default=[1.0], help="others: false alarms per million")
    given = options.parse_args()
    result = MEASUREMENTS[given.measurement](given)
    show(result, table(given.measurement, result), as_json=given.json, width=TABLE_WIDTH)


if __name__ == "__main__":
    command(main)
