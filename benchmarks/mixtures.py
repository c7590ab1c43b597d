"""Producers that are in the stream from its first record: are their records told apart?

    python -m benchmarks.mixtures --json

Every stream is a function of its seed. `mixed_N` draws each record's producer at random from N tasks; `bursts_N` lets
8 producers take turns at random, with N records at a time. Where `--data` has fewer tasks than producers, the others
are drawn from `--others`. Records are drawn in shuffled passes over their task. The metrics, by prompt and stream:

- purity: share of the records that belong to the most frequent task of their regime
- assignment: the same, but each task has one regime at most (best one-to-one matching), so a task in two regimes costs
- purity_later: purity of the second half of the stream
- regimes: number of regimes that records were assigned to
- us_per_record: processor time to assign a record

Slots are those that the learner gets: records that were released before a split keep theirs. `single` lists the tasks
that are split although no other task is in the stream.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.abstain import read_tasks
from benchmarks.measuring import OTHERS, SHARED, command, grid, parser, show
from benchmarks.streams import PROMPTS, Assigned, Prompt, Task, count, one_to_one, run_monitor
from streamlearn.settings import ShiftSettings
from streamlearn.shift.monitor import Monitor
from streamlearn.stream.record import Example

MIXED = (2, 3, 5, 10, 20)
BURSTS = (4, 8, 16, 32, 64)
BURST_PRODUCERS = 8
RECORDS_PER_PRODUCER = 200
MIN_PRODUCERS = 8
"""A stream of fewer producers has as many records as one of 8."""
MAX_TASK_RECORDS = 500
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


def measure(data: Path, others: Path, *, seeds: int) -> dict[str, Any]:
    """Return the metrics by prompt and kind of stream, means over the seeds."""
    tasks, suite = read_tasks(data, others, None, limit=MAX_TASK_RECORDS)
    kinds = {f"mixed_{number}": (number, 1) for number in MIXED}
    kinds |= {f"bursts_{length}": (BURST_PRODUCERS, length) for length in BURSTS}
    result: dict[str, Any] = {prompt: {} for prompt in PROMPTS}
    for prompt in PROMPTS:
        for kind, (producers, length) in kinds.items():
            rows = [_measure_stream(tasks, suite, prompt, producers, length, seed) for seed in range(seeds)]
            means = {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]}
            result[prompt][kind] = {**means, "purity_least": round(min(row["purity"] for row in rows), 4)}
    result["single"] = {prompt: _split_alone(tasks, prompt) for prompt in PROMPTS}
    result["setting"] = {"seeds": seeds, "tasks": len(tasks), "suite": len(suite), **ShiftSettings().model_dump()}
    return result


def _split_alone(tasks: Sequence[Task], prompt: Prompt) -> dict[str, Any]:
    """Names of the tasks that are split although their stream has no other task."""
    split = []
    for number, task in enumerate(tasks):
        examples, rng = task.examples[prompt], np.random.default_rng([SEED, number])
        order = np.concatenate([rng.permutation(len(examples)) for _ in range(-(-SINGLE_RECORDS // len(examples)))])
        if len(set(assign([examples[i] for i in order[:SINGLE_RECORDS].tolist()]).slots)) > 1:
            split.append(task.name)
    return {"tasks": len(tasks), "split": split}


def _measure_stream(
    tasks: Sequence[Task],
    suite: Sequence[int],
    prompt: Prompt,
    producers: int,
    length: int,
    seed: int,
) -> dict[str, float]:
    rng = np.random.default_rng([SEED, seed, producers, length])
    drawn = rng.permutation(np.setdiff1d(np.arange(len(tasks)), suite))
    chosen = np.concatenate([rng.permutation(suite), drawn])[:producers]
    order = turns(rng, len(chosen), length, RECORDS_PER_PRODUCER * max(producers, MIN_PRODUCERS)).tolist()
    passes: dict[int, list[int]] = {}
    stream = []
    for producer in order:
        examples = tasks[chosen[producer]].examples[prompt]
        if not passes.get(producer):
            passes[producer] = rng.permutation(len(examples)).tolist()
        stream.append(examples[passes[producer].pop()])
    return metrics(order, assign(stream))


def turns(rng: np.random.Generator, producers: int, length: int, num_records: int) -> NDArray[np.int64]:
    """Return the producer of each record: `length` records of one, then of another; with 1, of any."""
    order: list[int] = []
    while len(order) < num_records:
        producer = int(rng.integers(producers))
        if length == 1 or not order or producer != order[-1]:
            order += [producer] * length
    return np.array(order[:num_records])


def assign(stream: Sequence[Example]) -> Assigned:
    return run_monitor(Monitor(ShiftSettings(), seed=0), stream)


def metrics(tasks: Sequence[int], assigned: Assigned) -> dict[str, float]:
    """Return the metrics of one stream, given the task of each record."""
    slots, later = assigned.slots, len(tasks) // 2
    task_of_slot = one_to_one(tasks, slots)
    return {
        "purity": purity(tasks, slots),
        "assignment": sum(task_of_slot.get(slot) == task for slot, task in zip(slots, tasks, strict=True)) / len(tasks),
        "purity_later": purity(tasks[later:], slots[later:]),
        "regimes": len(set(slots)),
        "us_per_record": 1e6 * assigned.seconds / len(tasks),
    }


def purity(tasks: Sequence[int], slots: Sequence[int]) -> float:
    """Return the share of the records that belong to the most frequent task of their regime."""
    return float(count(tasks, slots).max(axis=1).sum() / len(tasks))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, default=SHARED / "superni", help="folder of SuperNI task files")
    options.add_argument("--others", type=Path, default=OTHERS, help="file of texts of other tasks")
    options.add_argument("--seeds", type=int, default=5, help="streams of each kind and prompt, one per seed")
    given = options.parse_args()
    result = measure(given.data, given.others, seeds=given.seeds)
    lines = [
        f"{prompt}: {len(single['split'])} of {single['tasks']} tasks are split in a stream of their own"
        for prompt, single in result["single"].items()
    ]
    rows = {f"{prompt} {kind}": values for prompt in PROMPTS for kind, values in result[prompt].items()}
    show(result, grid(rows, HEADINGS), *lines, as_json=given.json)


if __name__ == "__main__":
    command(main)
