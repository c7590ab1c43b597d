"""Benchmark of producers that are in the stream from its first record: are their records told apart?

    streamlearn bench mixtures --data ../shared/data/superni --others ../shared/data/pretrain/superni_other.jsonl.gz

Every stream is a function of its seed. `mixed_N` draws each record's producer at random from N tasks; `bursts_N` lets
8 producers take turns at random, with N records at a time. Where `--data` has fewer tasks than producers, the others
are drawn from `--others`. Records are drawn in shuffled passes over their task. The metrics, by prompt and stream:

- purity: share of the records that belong to the most frequent task of their regime
- assignment: the same, but each task has one regime at most (best one-to-one matching), so a task in two regimes costs
- purity_later: purity of the second half of the stream
- regimes: number of regimes that records were assigned to
- us_per_record: processor time to assign a record

Slots are those that the learner gets: records that were released before a split keep theirs. Under `single` stand the
tasks that are split although no other task is in the stream.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment

from benchmarks.abstain import RequestTask, read_tasks
from benchmarks.streams import PROMPTS, Prompt
from streamlearn.settings import ShiftSettings
from streamlearn.shift.monitor import Monitor
from streamlearn.stream.record import Batch, Example

MIXED = (2, 3, 5, 10, 20)
BURSTS = (4, 8, 16, 32, 64)
BURST_PRODUCERS = 8
RECORDS_PER_PRODUCER = 200
MIN_PRODUCERS = 8
"""A stream of fewer producers has as many records as one of 8."""
MAX_TASK_RECORDS = 500
BATCH_RECORDS = 8
SINGLE_RECORDS = 400
SEED = 0x3A
HEADINGS = {
    "purity": "purity",
    "purity_least": "least",
    "purity_later": "2nd half",
    "assignment": "one to one",
    "regimes": "regimes",
    "us_per_record": "us",
}
"""Columns of the table, described in the module's docstring; the least purity is that of the worst seed."""


@dataclass(frozen=True)
class AssignedStream:
    """The task and the regime's slot of each record of a stream."""

    tasks: NDArray[np.int64]
    slots: NDArray[np.int64]
    seconds: float

    def metrics(self) -> dict[str, float]:
        """See the module's docstring."""
        later = slice(len(self.tasks) // 2, None)
        return {
            "purity": purity(self.tasks, self.slots),
            "assignment": assignment(self.tasks, self.slots),
            "purity_later": purity(self.tasks[later], self.slots[later]),
            "regimes": len(set(self.slots.tolist())),
            "us_per_record": 1e6 * self.seconds / len(self.tasks),
        }


def report(*, data: Path, others: Path, seeds: int, as_json: bool, quick: bool = False) -> None:
    """Measure and print the metrics, means over the seeds; `quick` makes few, short streams."""
    result = measure(data, others, seeds=seeds, quick=quick)
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        console = Console()
        console.print(table(result))
        for prompt in PROMPTS:
            alone = result["single"][prompt]
            console.print(
                f"{prompt}: {len(alone['split'])} of {alone['tasks']} tasks are split in a stream of their own"
            )


def measure(data: Path, others: Path, *, seeds: int, quick: bool = False) -> dict[str, Any]:
    """The metrics by prompt and kind of stream, and under `setting` what they were measured on."""
    tasks, suite = read_tasks(data, others, None, limit=60 if quick else MAX_TASK_RECORDS)
    kinds = {f"mixed_{number}": (number, 1) for number in (MIXED[:1] if quick else MIXED)}
    kinds |= {f"bursts_{length}": (BURST_PRODUCERS, length) for length in (BURSTS[:1] if quick else BURSTS)}
    per_producer = 25 if quick else RECORDS_PER_PRODUCER
    result: dict[str, Any] = {}
    for prompt in PROMPTS:
        result[prompt] = {}
        for kind, (producers, length) in kinds.items():
            outcomes = [_outcome(tasks, suite, prompt, producers, length, seed, per_producer) for seed in range(seeds)]
            result[prompt][kind] = _summary([each.metrics() for each in outcomes])
    result["single"] = {prompt: _single(tasks, prompt, 60 if quick else SINGLE_RECORDS) for prompt in PROMPTS}
    result["setting"] = {"seeds": seeds, "tasks": len(tasks), "suite": len(suite), **ShiftSettings().model_dump()}
    return result


def _single(tasks: Sequence[RequestTask], prompt: Prompt, num_records: int) -> dict[str, Any]:
    """Names of the tasks that are split in a stream of their own."""
    found = []
    for number, task in enumerate(tasks):
        examples, rng = task.examples[prompt], np.random.default_rng([SEED, number])
        order = np.concatenate([rng.permutation(len(examples)) for _ in range(-(-num_records // len(examples)))])
        stream = [examples[i] for i in order[:num_records].tolist()]
        if len(set(run(np.zeros(len(stream), dtype=np.int64), stream).slots.tolist())) > 1:
            found.append(task.name)
    return {"tasks": len(tasks), "split": found}


def _outcome(
    tasks: Sequence[RequestTask],
    suite: Sequence[int],
    prompt: Prompt,
    producers: int,
    length: int,
    seed: int,
    per_producer: int,
) -> AssignedStream:
    rng = np.random.default_rng([SEED, seed, producers, length])
    drawn = rng.permutation(np.setdiff1d(np.arange(len(tasks)), suite))
    chosen = np.concatenate([rng.permutation(suite), drawn])[:producers]
    order = turns(rng, len(chosen), length, per_producer * max(producers, MIN_PRODUCERS))
    passes: dict[int, list[int]] = {}
    stream = []
    for producer in order.tolist():
        examples = tasks[chosen[producer]].examples[prompt]
        if not passes.get(producer):
            passes[producer] = rng.permutation(len(examples)).tolist()
        stream.append(examples[passes[producer].pop()])
    return run(order, stream)


def turns(rng: np.random.Generator, producers: int, length: int, num_records: int) -> NDArray[np.int64]:
    """The producer of each record: `length` records of one, then of another; with 1, of any."""
    order: list[int] = []
    while len(order) < num_records:
        producer = int(rng.integers(producers))
        if length == 1 or not order or producer != order[-1]:
            order += [producer] * length
    return np.array(order[:num_records])


def run(tasks: NDArray[np.int64], stream: Sequence[Example]) -> AssignedStream:
    """Let a monitor assign the records of a stream."""
    monitor = Monitor(ShiftSettings(), vocab_size=1, seed=0)
    batches = [
        Batch((), tuple(stream[start : start + BATCH_RECORDS])) for start in range(0, len(stream), BATCH_RECORDS)
    ]
    started = time.process_time()
    assigned = [each for batch in batches for each in monitor.update(batch)] + monitor.flush()
    seconds = time.process_time() - started
    return AssignedStream(tasks, np.array([slot for each in assigned for slot in each.slots]), seconds)


def purity(tasks: NDArray[np.int64], slots: NDArray[np.int64]) -> float:
    """Share of the records that belong to the most frequent task of their regime."""
    return float(_counts(tasks, slots).max(axis=1).sum() / len(tasks))


def assignment(tasks: NDArray[np.int64], slots: NDArray[np.int64]) -> float:
    """Share of the records in the regime of their task, under the best one-to-one matching."""
    counts = _counts(tasks, slots)
    return float(counts[linear_sum_assignment(counts, maximize=True)].sum() / len(tasks))


def _counts(tasks: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.zeros((slots.max() + 1, tasks.max() + 1), dtype=np.int64)
    np.add.at(counts, (slots, tasks), 1)
    return counts


def _summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the seeds, and the smallest purity."""
    means = {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]}
    return {**means, "purity_least": round(min(row["purity"] for row in rows), 4)}


def table(result: Mapping[str, Any]) -> Table:
    """The metrics, one row per prompt and kind of stream."""
    shown = Table("prompt", "stream", *HEADINGS.values(), box=None, pad_edge=False)
    for prompt in PROMPTS:
        for kind, values in result[prompt].items():
            shown.add_row(prompt, kind, *(f"{values[name]:.3g}" for name in HEADINGS))
    return shown
