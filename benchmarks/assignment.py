"""What a monitor makes of mixed producers, and of requests of tasks that it has not seen.

Streams are drawn from the tasks of `--data` and of `--others`, and read by a monitor without task labels.

**Mixtures** are streams whose producers are there from the first record: `mixed_N` draws each record's producer at
random from N tasks; `bursts_N` lets 8 producers take turns at random, with N records at a time. Where `--data` has
fewer tasks than producers, the others are drawn from `--others`. Records are drawn in shuffled passes over their task.
Slots are those that the learner gets: records that were released before a split keep theirs. By prompt and stream:

- purity: share of the records that belong to the most frequent task of their regime; least: that of the worst seed
- assignment: the same, but each task has one regime at most (best one-to-one matching), so a task in two regimes costs
- regimes: number of regimes that records were assigned to

**Requests**: a monitor reads up to `TRAIN_RECORDS` records of each of some random tasks, one task after another, and
then classifies records that were not in the stream: the remaining ones of the same tasks (known) and records of tasks
that were not drawn (unknown). `superni` are all tasks of `--data` together, which are less alike than tasks drawn at
random: among those are groups that differ in one word of the definition, and some cannot be told apart by bare inputs
at all. A gateway gets the same requests and the monitor's state as a publication. By prompt and number of tasks:

- routed: share of the known requests whose likeliest regime is that of most of their task's records
- auroc: probability that a known request has a larger p-value than an unknown one; ties count half
- known_rejected: share of the known requests that match no regime, at most the level if it is calibrated
- unknown_detected: share of the unknown requests that match no regime
- gateway_differs: share of all requests whose regime, or none, is another one in the gateway than in the daemon
- ms_per_request: processor time to classify a request; classifier_ms: to prepare for a new state of the memory
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.data import Row, to_chat, to_record
from benchmarks.streams import (
    PROMPTS,
    Assigned,
    Prompt,
    Task,
    count,
    one_to_one,
    read_folder,
    read_others,
    run_monitor,
    text_featurizer,
    to_tasks,
)
from streamlearn.codec import to_arrays
from streamlearn.gateway.publication import LoadedPublication
from streamlearn.settings import ServeSettings, ShiftSettings
from streamlearn.shift.features import Featurizer, input_of
from streamlearn.shift.monitor import Monitor
from streamlearn.shift.routing import Assignment
from streamlearn.stream.record import Example
from tests.gateway.sample_publication import publish_sample

MIN_RECORDS = 100
"""A task with fewer records is not drawn."""


def read_tasks(data: Path, others: Path, backbone: Path | None, limit: int) -> tuple[list[Task], list[int]]:
    """Return the tasks of both sources, at most `limit` records of each, and the indices of those in `data`."""
    form = to_record if backbone is None else to_chat
    own = read_folder(data, limit)
    texts = {task: rows[:limit] for task, rows in read_others(others, MIN_RECORDS).items()}
    rows: dict[str, Sequence[Row]] = {**own, **texts}
    return to_tasks(rows, backbone, form, partial(form, bare=True)), list(range(len(own)))


MIXED = (2, 3, 5, 10, 20)
BURSTS = (4, 8, 16, 32, 64)
BURST_PRODUCERS = 8
RECORDS_PER_PRODUCER = 200
MIN_PRODUCERS = 8
"""A stream of fewer producers has as many records as one of 8."""
MAX_TASK_RECORDS = 500
MIXTURE_COLUMNS = ("purity", "least", "assignment", "regimes", "us_per_record")


def measure_mixtures(data: Path, others: Path, *, seeds: int) -> dict[str, Any]:
    """Return the metrics by prompt and kind of stream, means over the seeds."""
    tasks, suite = read_tasks(data, others, None, limit=MAX_TASK_RECORDS)
    kinds = {f"mixed_{number}": (number, 1) for number in MIXED}
    kinds |= {f"bursts_{length}": (BURST_PRODUCERS, length) for length in BURSTS}
    result: dict[str, Any] = {prompt: {} for prompt in PROMPTS}
    for prompt in PROMPTS:
        for kind, (producers, length) in kinds.items():
            rows = [_measure_mixture(tasks, suite, prompt, producers, length, seed) for seed in range(seeds)]
            means = {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]}
            result[prompt][kind] = {**means, "least": round(min(row["purity"] for row in rows), 4)}
    result["setting"] = {"seeds": seeds, "tasks": len(tasks), "suite": len(suite), **ShiftSettings().model_dump()}
    return result


def _measure_mixture(
    tasks: Sequence[Task], suite: Sequence[int], prompt: Prompt, producers: int, length: int, seed: int
) -> dict[str, float]:
    rng = np.random.default_rng([0x3A, seed, producers, length])
    drawn = rng.permutation(np.setdiff1d(np.arange(len(tasks)), suite))
    chosen = np.concatenate([rng.permutation(suite), drawn])[:producers]
    order = turns(rng, len(chosen), length, RECORDS_PER_PRODUCER * max(producers, MIN_PRODUCERS))
    passes: dict[int, list[int]] = {}
    stream = []
    for producer in order:
        examples = tasks[chosen[producer]].examples[prompt]
        if not passes.get(producer):
            passes[producer] = rng.permutation(len(examples)).tolist()
        stream.append(examples[passes[producer].pop()])
    return mixture_metrics(order, run_monitor(Monitor(ShiftSettings(), text_featurizer()), stream))


def turns(rng: np.random.Generator, producers: int, length: int, num_records: int) -> list[int]:
    """Return the producer of each record: `length` records of one, then of another; with 1, of any."""
    order: list[int] = []
    while len(order) < num_records:
        producer = int(rng.integers(producers))
        if length == 1 or not order or producer != order[-1]:
            order += [producer] * length
    return order[:num_records]


def mixture_metrics(tasks: Sequence[int], assigned: Assigned) -> dict[str, float]:
    """Return the metrics of one stream, given the task of each record."""
    slots = assigned.slots
    task_of_slot = one_to_one(tasks, slots)
    return {
        "purity": float(count(tasks, slots).max(axis=1).sum() / len(tasks)),
        "assignment": sum(task_of_slot.get(slot) == task for slot, task in zip(slots, tasks, strict=True)) / len(tasks),
        "regimes": len(set(slots)),
        "us_per_record": 1e6 * assigned.seconds / len(tasks),
    }


TRAIN_RECORDS = 80
"""Maximum records of a task in the stream."""
KNOWN_RECORDS = 40
"""Maximum other records of a task of the stream that are classified."""
UNKNOWN_RECORDS = 2
"""Records of each task that is not in the stream."""
DRAWS = {1: 40, 2: 20, 8: 6, 15: 4, 100: 1}
"""Number of tasks in a stream -> number of draws of them, so that each has about the same number of known requests."""
REQUEST_COLUMNS = (
    "known",
    "unknown",
    "routed",
    "auroc",
    "known_rejected",
    "unknown_detected",
    "gateway_differs",
    "ms_per_request",
)


@dataclass
class RequestScores:
    """The p-values of the requests of one stream, or of several together."""

    known: list[float]
    unknown: list[float]
    routed: int = 0
    differing: int = 0
    request_s: float = 0.0
    classifier_s: float = 0.0
    streams: int = 1

    def __add__(self, other: "RequestScores") -> "RequestScores":
        return RequestScores(
            self.known + other.known,
            self.unknown + other.unknown,
            self.routed + other.routed,
            self.differing + other.differing,
            self.request_s + other.request_s,
            self.classifier_s + other.classifier_s,
            self.streams + other.streams,
        )

    def metrics(self, level: float) -> dict[str, float]:
        """See the module's docstring; `level` is `serve.max_known_rejected`."""
        known, unknown = np.array(self.known), np.array(self.unknown)
        return {
            "streams": self.streams,
            "known": len(known),
            "unknown": len(unknown),
            "routed": round(self.routed / len(known), 4),
            "auroc": round(auroc(known, unknown), 4),
            "known_rejected": round(float((known < level).mean()), 4),
            "unknown_detected": round(float((unknown < level).mean()), 4),
            "gateway_differs": round(self.differing / (len(known) + len(unknown)), 4),
            "ms_per_request": round(1e3 * self.request_s / (len(known) + len(unknown)), 3),
            "classifier_ms": round(1e3 * self.classifier_s / self.streams, 1),
        }


def measure_requests(data: Path, others: Path, backbone: Path | None) -> dict[str, Any]:
    """Return the metrics by prompt and number of tasks."""
    with TemporaryDirectory() as folder:
        return _measure_requests(data, others, backbone, Path(folder))


def _measure_requests(data: Path, others: Path, backbone: Path | None, folder: Path) -> dict[str, Any]:
    tasks, suite = read_tasks(data, others, backbone, limit=TRAIN_RECORDS + KNOWN_RECORDS)
    level = ServeSettings().max_known_rejected
    result: dict[str, Any] = {}
    for prompt in PROMPTS:
        scores: dict[str, RequestScores] = {}
        for number, draws in DRAWS.items():
            for draw in range(draws if number < len(tasks) else 0):
                rng = np.random.default_rng([0xAB, number, draw])
                drawn = classify(tasks, rng.permutation(len(tasks))[:number].tolist(), prompt, rng, folder, backbone)
                scores[f"{number}"] = scores[f"{number}"] + drawn if draw else drawn
        scores["superni"] = classify(tasks, suite, prompt, np.random.default_rng([0xAB]), folder, backbone)
        result[prompt] = {name: outcome.metrics(level) for name, outcome in scores.items()}
    result["setting"] = {
        "level": level,
        "tasks": len(tasks),
        "train_records": TRAIN_RECORDS,
        "backbone": "builtin:nano" if backbone is None else backbone.resolve().name,
    }
    return result


def classify(
    tasks: Sequence[Task],
    chosen: Sequence[int],
    prompt: Prompt,
    rng: np.random.Generator,
    folder: Path,
    backbone: Path | None = None,
) -> RequestScores:
    """Let a monitor read the chosen tasks, and classify requests of all; it is published in `folder`."""
    stream: list[tuple[int, Example]] = []
    known: list[tuple[int, Example]] = []
    for task in chosen:
        examples = tasks[task].examples[prompt]
        order = rng.permutation(len(examples)).tolist()
        cut = min(TRAIN_RECORDS, 2 * len(order) // 3)
        stream += [(task, examples[i]) for i in order[:cut]]
        known += [(task, examples[i]) for i in order[cut : cut + KNOWN_RECORDS]]
    unknown = [
        task.examples[prompt][i]
        for number, task in enumerate(tasks)
        if number not in chosen
        for i in rng.permutation(len(task.examples[prompt]))[:UNKNOWN_RECORDS].tolist()
    ]
    monitor = Monitor(ShiftSettings(max_regimes=256), text_featurizer(backbone))
    slots = run_monitor(monitor, [example for _, example in stream]).slots
    main_slots = count([task for task, _ in stream], slots).argmax(axis=0)
    monitor.trained = monitor.state
    requests = [input_of(request) for request in (*(example for _, example in known), *unknown)]
    started = time.process_time()
    monitor.assign(requests[:1])
    prepared = time.process_time()
    assigned = monitor.assign(requests)
    p_values, ended = [one.p_value for one in assigned], time.process_time()
    return RequestScores(
        p_values[: len(known)],
        p_values[len(known) :],
        sum(one.slot == int(main_slots[task]) for one, (task, _) in zip(assigned, known, strict=False)),
        differing(monitor, requests, assigned, text_featurizer(backbone), folder),
        ended - prepared,
        prepared - started,
    )


def differing(
    monitor: Monitor,
    requests: Sequence[NDArray[np.int32]],
    assigned: Sequence[Assignment],
    featurizer: Featurizer,
    folder: Path,
) -> int:
    """Number of requests that a gateway routes otherwise than the monitor, whose state is published in a folder."""
    level, numbers = ServeSettings().max_known_rejected, monitor.trained.detector.numbers
    state, vectors_VD = to_arrays(monitor.trained), featurizer.table_VD
    publish_sample(folder, state=state, vectors_VD=vectors_VD, max_known_rejected=level)
    gateway = LoadedPublication.read(folder)
    theirs = [gateway.route(tuple(request.tolist())).regime for request in requests]
    own = [numbers[one.slot] if one.p_value >= level else None for one in assigned]
    return sum(one != other for one, other in zip(own, theirs, strict=True))


def auroc(known: NDArray[np.float64], unknown: NDArray[np.float64]) -> float:
    """Probability that a value of `known` is larger than one of `unknown`, ties counted half (Mann-Whitney)."""
    ranks = rankdata(np.concatenate([known, unknown]))[: len(known)]
    return float((ranks.sum() - len(known) * (len(known) + 1) / 2) / (len(known) * len(unknown)))
