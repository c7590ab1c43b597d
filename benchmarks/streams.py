"""Streams of real tasks with known boundaries, and what a monitor makes of them: shared by the detection benchmarks.

Every stream is a function of its seed. Records are drawn from the tasks' training files in shuffled passes, so a task
of 160 records can supply 10,000. Kinds of streams that `StreamMaker` builds:

- abrupt: one new task after another;
- gradual: the same, but the share of the next task rises from 0 to 1 over 200 records;
- recurring: 5 tasks that come back, 8 to 15 boundaries;
- interleaved_2, interleaved_3: two or three producers at a time that join and leave, mixed record by record;
- stationary: 10,000 records of one task in random order;
- autocorrelated: the same in an order that is common in files: grouped by source passage, in bursts of similar length,
  or in chunks sorted by length.
"""

import gzip
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from scipy.optimize import linear_sum_assignment

from benchmarks.data import Row, read_texts, to_record
from streamlearn.backbone.load import load, load_tokenizer, outline
from streamlearn.errors import UsageError
from streamlearn.settings import BackboneSettings, StreamSettings
from streamlearn.shift.detector import Shift
from streamlearn.shift.features import Featurizer
from streamlearn.shift.monitor import AssignedBatch, Monitor
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Batch, Example

Prompt = Literal["definition", "bare"]
PROMPTS: tuple[Prompt, ...] = ("definition", "bare")
Form = Callable[[Row], dict[str, Any]]
RAMP = 200
"""Length of a gradual change, in records."""
RECURRING_TASKS = 5
PASSAGE_CHARS = 60
"""Records whose inputs share this many leading characters are taken to come from one source passage."""
MIN_TASKS = 4
"""Three interleaved producers and the one that joins after them."""
BATCH_RECORDS = 8


@dataclass(frozen=True)
class Task:
    """Decoded records of one task."""

    name: str
    examples: Mapping[Prompt, Sequence[Example]]
    passages: Sequence[int]
    """Number of the source passage of each record."""


@dataclass(frozen=True)
class Boundary:
    """A true change of the stream."""

    at: int
    """Ordinal, from 1, of the first record after the change."""
    task: int | None
    """The task that joins; None if a task only leaves, which a detector need not declare."""
    returns: bool = False
    """Whether the task was in the stream before."""


@dataclass(frozen=True)
class Stream:
    """An order of records, and its true boundaries."""

    kind: str
    prompt: Prompt
    tasks: tuple[int, ...]
    """The task of each record."""
    records: tuple[int, ...]
    """The number of each record within its task."""
    boundaries: tuple[Boundary, ...] = ()

    def examples(self, tasks: Sequence[Task]) -> Iterator[Example]:
        for task, record in zip(self.tasks, self.records, strict=True):
            yield tasks[task].examples[self.prompt][record]


def text_decoder(backbone: Path | None = None, stream: StreamSettings | None = None) -> Decoder:
    """Return the decoder of the backbone in a folder, or of the bundled one."""
    shape = outline(BackboneSettings() if backbone is None else BackboneSettings(model=str(backbone.resolve())))
    return Decoder(load_tokenizer(shape), stream or StreamSettings(), shape.config.get_text_config().vocab_size)


@cache
def text_featurizer(backbone: Path | None = None) -> Featurizer:
    """Return the featurizer of the same backbone."""
    settings = BackboneSettings() if backbone is None else BackboneSettings(model=str(backbone.resolve()))
    return Featurizer(0, load(settings, outline(settings)).token_vectors)


def read_folder(folder: Path, limit: int | None = None) -> dict[str, list[Row]]:
    """Return at most `limit` rows of each task of a folder, see `data`.

    Raises:
        UsageError: the folder holds fewer than `MIN_TASKS` tasks.
    """
    files = sorted(folder.glob("*.train.jsonl.gz"))
    if len(files) < MIN_TASKS:
        raise UsageError(
            f"{folder} must hold at least {MIN_TASKS} task files NAME.train.jsonl.gz, found {len(files)}; set the "
            "folder with --data"
        )
    rows: dict[str, list[Row]] = {}
    for file in files:
        with gzip.open(file) as lines:
            rows[file.name.split(".")[0]] = [orjson.loads(line) for line in islice(lines, limit)]
    return rows


def read_others(file: Path, least: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the tasks of a file of texts that have at least `least` of them, each with an input.

    Raises:
        UsageError: there is no such file, or no such task in it.
    """
    texts = {
        name: rows
        for name, rows in read_texts(file).items()
        if len(rows) >= least and all(row["input"] for row in rows)
    }
    if not texts:
        raise UsageError(f"{file}: expected a task of at least {least} texts, found none; set --others")
    return texts


def input_alone(row: Row) -> dict[str, Any]:
    """Convert a row to a record whose prompt is the input and nothing else."""
    return to_record(row) | {"prompt": row["input"]}


def to_tasks(
    rows: Mapping[str, Sequence[Row]],
    backbone: Path | None = None,
    form: Form = to_record,
    bare: Form = input_alone,
    stream: StreamSettings | None = None,
) -> list[Task]:
    """Decode the rows of each task in both forms: with its definition, and `bare`."""
    decoder, forms = text_decoder(backbone, stream), {"definition": form, "bare": bare}
    tasks = []
    for name, own in rows.items():
        starts = [row.get("input", "")[:PASSAGE_CHARS] for row in own]
        numbers = {start: i for i, start in enumerate(dict.fromkeys(starts))}
        examples: dict[Any, list[Example]] = {
            prompt: [decoder.decode_value(convert(row)) for row in own] for prompt, convert in forms.items()
        }
        tasks.append(Task(name, examples, [numbers[start] for start in starts]))
    return tasks


@dataclass(frozen=True)
class Assigned:
    """What a monitor made of a stream."""

    shifts: list[Shift]
    slots: list[int]
    """Of each record."""
    seconds: float
    """Processor time of this process: others share the cores."""


def run_monitor(monitor: Monitor, examples: Sequence[Example]) -> Assigned:
    """Let a monitor read a whole stream in batches."""
    batches = [
        Batch((), tuple(examples[start : start + BATCH_RECORDS])) for start in range(0, len(examples), BATCH_RECORDS)
    ]
    assigned: list[AssignedBatch] = []
    started = time.process_time()
    for batch in batches:
        monitor.update(batch)
        assigned += iter(monitor.take, None)
    monitor.flush()
    assigned += iter(monitor.take, None)
    seconds = time.process_time() - started
    return Assigned(
        [shift for batch in assigned for shift in batch.shifts],
        [slot for batch in assigned for slot in batch.slots],
        seconds,
    )


def one_to_one(tasks: Sequence[int], slots: Sequence[int]) -> dict[int, int]:
    """Return the task of each slot, one to one, such that as many records as possible are in their task's slot."""
    counts = count(tasks, slots)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return {slot: task for slot, task in zip(rows.tolist(), columns.tolist(), strict=True) if counts[slot, task] > 0}


def count(tasks: Sequence[int], slots: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the number of records by slot and task."""
    counts = np.zeros((max(slots) + 1, max(tasks) + 1), dtype=np.int64)
    np.add.at(counts, (np.array(slots), np.array(tasks)), 1)
    return counts


def matches(boundaries: Sequence[int], end: int, declared: Sequence[int], reach: int) -> dict[int, int]:
    """Match each boundary with the first shift after it, before the next boundary; each shift matches one at most.

    >>> matches([31, 61], 91, [20, 70, 75], reach=64)
    {1: 1}

    Args:
        boundaries: Ordinal of the first record after each boundary, ascending.
        end: Ordinal after the last record of the stream.
        declared: Ordinals of the records at which shifts were declared, ascending.
        reach: Number of records from a boundary on in which a shift counts as its detection.

    Returns:
        Index of a boundary -> index of its shift; boundaries that were missed are not in it.
    """
    hits = {}
    for number, (start, following) in enumerate(pairwise([*boundaries, end])):
        last = min(start + reach, following)
        hit = next((index for index, at in enumerate(declared) if start <= at < last), None)
        if hit is not None:
            hits[number] = hit
    return hits


def ratio(part: float, whole: float, digits: int = 4) -> float | None:
    """Return the rounded ratio; None where the denominator is 0."""
    return round(part / whole, digits) if whole else None


class StreamMaker:
    """Builds the streams of one seed, see the module."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, stationary_records: int = 10_000) -> None:
        self._tasks = tasks
        self._seed = seed
        self._stationary_records = stationary_records
        self._rng = np.random.default_rng([seed, 0xD7])
        self._waiting: dict[int, list[int]] = {}

    def all(self, prompt: Prompt) -> list[Stream]:
        return [
            self.abrupt(prompt),
            self.gradual(prompt),
            self.recurring(prompt),
            self.interleaved(prompt, 2),
            self.interleaved(prompt, 3),
            self.stationary(prompt),
            self.autocorrelated(prompt),
        ]

    def abrupt(self, prompt: Prompt) -> Stream:
        order = self._rng.permutation(len(self._tasks)).tolist()
        return self._sequence("abrupt", prompt, order, ramp=0)

    def gradual(self, prompt: Prompt) -> Stream:
        order = self._rng.permutation(len(self._tasks)).tolist()
        return self._sequence("gradual", prompt, order, ramp=RAMP)

    def recurring(self, prompt: Prompt) -> Stream:
        chosen = self._rng.permutation(len(self._tasks))[: min(RECURRING_TASKS, len(self._tasks) - 1)].tolist()
        order = list(chosen)
        for _ in range(int(self._rng.integers(8, 16)) + 1 - len(chosen)):
            order.append(int(self._rng.choice([task for task in chosen if task != order[-1]])))
        return self._sequence("recurring", prompt, order, ramp=0)

    def interleaved(self, prompt: Prompt, producers: int) -> Stream:
        """Build a stream of at most `producers` tasks at a time, which join and leave one by one."""
        order = self._rng.permutation(len(self._tasks))[: producers + 1].tolist()
        joining = [order[: i + 1] for i in range(producers)]
        phases = [*joining, *(order[i:] for i in range(1, producers + 1))]
        tasks: list[int] = []
        boundaries = []
        seen: set[int] = set()
        for phase in phases:
            new = [task for task in phase if task not in seen]
            if tasks:
                arrival = new[0] if new else None
                boundaries.append(Boundary(len(tasks) + 1, arrival))
            seen |= set(phase)
            tasks += self._rng.choice(phase, size=int(self._rng.integers(200, 400))).tolist()
        return self._stream(f"interleaved_{producers}", prompt, tasks, boundaries)

    def stationary(self, prompt: Prompt) -> Stream:
        task = int(self._rng.integers(len(self._tasks)))
        return self._stream("stationary", prompt, [task] * self._stationary_records, [])

    def autocorrelated(self, prompt: Prompt) -> Stream:
        """Build a stream of one task in file-like order; the seed selects passages, bursts or sorted chunks."""
        with_passages = [i for i, task in enumerate(self._tasks) if len(set(task.passages)) < 0.95 * len(task.passages)]
        orders = [self._by_length_bursts, self._by_sorted_chunks]
        if with_passages and self._seed % 3 == 0:
            task, order = with_passages[self._seed // 3 % len(with_passages)], self._by_passage
        else:
            task, order = int(self._rng.integers(len(self._tasks))), orders[self._seed % 2]
        records: list[int] = []
        while len(records) < self._stationary_records:
            records += order(task, prompt)
        records = records[: self._stationary_records]
        return Stream("autocorrelated", prompt, (task,) * len(records), tuple(records))

    def _by_passage(self, task: int, prompt: Prompt) -> list[int]:
        """Passages in random order, each with its records in sequence."""
        del prompt
        passages = np.array(self._tasks[task].passages)
        rank = self._rng.permutation(passages.max() + 1)
        return [int(record) for record in np.argsort(rank[passages], kind="stable")]

    def _by_length_bursts(self, task: int, prompt: Prompt) -> list[int]:
        """Bursts of 16 records of similar length, in random order."""
        ordered = self._sorted(self._rng.permutation(self._size(task)), task, prompt)
        bursts = [ordered[i : i + 16] for i in range(0, len(ordered), 16)]
        return [record for i in self._rng.permutation(len(bursts)) for record in bursts[i]]

    def _by_sorted_chunks(self, task: int, prompt: Prompt) -> list[int]:
        """Chunks of 64 random records, each sorted by length."""
        shuffled = self._rng.permutation(self._size(task))
        chunks = [shuffled[i : i + 64] for i in range(0, len(shuffled), 64)]
        return [record for chunk in chunks for record in self._sorted(chunk, task, prompt)]

    def _sorted(self, records: Sequence[int] | np.ndarray[Any, Any], task: int, prompt: Prompt) -> list[int]:
        return sorted((int(i) for i in records), key=lambda i: self._tasks[task].examples[prompt][i].prompt_length)

    def _size(self, task: int) -> int:
        return len(self._tasks[task].passages)

    def _sequence(self, kind: str, prompt: Prompt, order: Sequence[int], *, ramp: int) -> Stream:
        tasks: list[int] = []
        boundaries = []
        for i, task in enumerate(order):
            if i:
                boundaries.append(Boundary(len(tasks) + 1, task, returns=task in order[:i]))
                share = (np.arange(ramp) + 0.5) / max(ramp, 1)
                tasks += np.where(self._rng.random(ramp) < share, task, order[i - 1]).tolist()
            tasks += [task] * int(self._rng.integers(100, 300))
        return self._stream(kind, prompt, tasks, boundaries)

    def _stream(self, kind: str, prompt: Prompt, tasks: Sequence[int], boundaries: Sequence[Boundary]) -> Stream:
        records = tuple(self._draw(task) for task in tasks)
        return Stream(kind, prompt, tuple(tasks), records, tuple(boundaries))

    def _draw(self, task: int) -> int:
        """The next record of a shuffled pass over the task."""
        if not self._waiting.get(task):
            self._waiting[task] = self._rng.permutation(self._size(task)).tolist()
        return self._waiting[task].pop()
