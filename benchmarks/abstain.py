"""Benchmark of novelty detection: requests of tasks that were in the stream, and of tasks that were not.

    streamlearn bench abstain --data ../shared/data/superni --others ../shared/data/pretrain/superni_other.jsonl.gz

Tasks are drawn at random; a monitor reads up to `TRAIN_RECORDS` records of each, one task after another, and then
classifies records that were not in the stream: the remaining ones of the same tasks (known) and records of tasks that
were not drawn (unknown). Nothing is told about tasks. Only training files are read. The metrics:

- auroc: probability that a known request has a larger p-value than an unknown one; ties count half
- known_rejected: share of the known requests that no regime is found to explain, at most the level if it is calibrated
- unknown_detected: share of the unknown requests that no regime is found to explain
- ms_per_request: processor time to classify a request; classifier_ms: to prepare for a new state of the memory

`superni` are all tasks of `--data` together, which are less alike than tasks drawn at random: among those are groups
that differ in one word of the definition, and by bare inputs some cannot be told apart at all.
"""

import gzip
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import rankdata

from benchmarks.streams import PROMPTS, Prompt, text_decoder
from benchmarks.superni import read_texts, to_chat, to_record
from streamlearn.errors import UsageError
from streamlearn.settings import ServeSettings, ShiftSettings
from streamlearn.shift.features import input_of
from streamlearn.shift.input_shift import Assignment
from streamlearn.shift.monitor import Monitor
from streamlearn.stream.record import Batch, Example

TRAIN_RECORDS = 80
"""Maximum records of a task in the stream."""
KNOWN_RECORDS = 40
"""Maximum other records of a task of the stream that are classified."""
UNKNOWN_RECORDS = 2
"""Records of each task that is not in the stream."""
MIN_RECORDS = 100
"""A task with fewer records is not drawn."""
DRAWS = {1: 40, 2: 20, 8: 6, 15: 4, 100: 1}
"""Number of tasks in a stream -> number of draws of them, so that each has about the same number of known requests."""
BATCH_RECORDS = 8
SEED = 0xAB
COLUMNS = ("streams", "known", "unknown", "auroc", "known_rejected", "unknown_detected", "ms_per_request")


@dataclass(frozen=True)
class RequestTask:
    """Decoded records of one task."""

    name: str
    examples: Mapping[Prompt, Sequence[Example]]


@dataclass
class RequestScores:
    """What a monitor says about the requests of one stream, or of several together."""

    known: list[float]
    """p-values."""
    unknown: list[float]
    request_s: float = 0.0
    classifier_s: float = 0.0
    streams: int = 1

    def __add__(self, other: "RequestScores") -> "RequestScores":
        """Both together."""
        return RequestScores(
            self.known + other.known,
            self.unknown + other.unknown,
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
            "auroc": round(auroc(known, unknown), 4),
            "known_rejected": round(float((known < level).mean()), 4),
            "unknown_detected": round(float((unknown < level).mean()), 4),
            "ms_per_request": round(1e3 * self.request_s / (len(known) + len(unknown)), 3),
            "classifier_ms": round(1e3 * self.classifier_s / self.streams, 1),
        }


def report(*, data: Path, others: Path, backbone: Path | None, as_json: bool, quick: bool = False) -> None:
    """Measure and print the metrics of each number of tasks; `quick` makes few, short streams."""
    result = measure(data, others, backbone, quick=quick)
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        Console().print(table(result))


def measure(data: Path, others: Path, backbone: Path | None, *, quick: bool = False) -> dict[str, Any]:
    """The metrics by prompt and number of tasks, and under `setting` what they were measured on."""
    tasks, suite = read_tasks(data, others, backbone, limit=60 if quick else TRAIN_RECORDS + KNOWN_RECORDS)
    level = ServeSettings().max_known_rejected
    draws = {1: 1, 2: 1} if quick else {number: draws for number, draws in DRAWS.items() if number < len(tasks)}
    result: dict[str, Any] = {}
    for prompt in PROMPTS:
        outcomes = {f"{number}": _drawn(tasks, prompt, number, num_draws) for number, num_draws in draws.items()}
        outcomes["superni"] = run(tasks, suite, prompt, np.random.default_rng([SEED]))
        result[prompt] = {name: outcome.metrics(level) for name, outcome in outcomes.items()}
    result["setting"] = {
        "level": level,
        "tasks": len(tasks),
        "train_records": TRAIN_RECORDS,
        "backbone": "builtin:nano" if backbone is None else backbone.resolve().name,
    }
    return result


def _drawn(tasks: Sequence[RequestTask], prompt: Prompt, number: int, draws: int) -> RequestScores:
    """Several streams of `number` tasks each."""
    outcomes = []
    for draw in range(draws):
        rng = np.random.default_rng([SEED, number, draw])
        outcomes.append(run(tasks, rng.permutation(len(tasks))[:number].tolist(), prompt, rng))
    return sum(outcomes[1:], start=outcomes[0])


def run(tasks: Sequence[RequestTask], chosen: Sequence[int], prompt: Prompt, rng: np.random.Generator) -> RequestScores:
    """Let a monitor read the chosen tasks, and classify requests of all."""
    monitor = Monitor(ShiftSettings(max_regimes=256), vocab_size=1, seed=0)
    stream: list[Example] = []
    known: list[Example] = []
    for task in chosen:
        examples = tasks[task].examples[prompt]
        order = rng.permutation(len(examples)).tolist()
        cut = min(TRAIN_RECORDS, 2 * len(order) // 3)
        stream += [examples[i] for i in order[:cut]]
        known += [examples[i] for i in order[cut : cut + KNOWN_RECORDS]]
    unknown = [
        each.examples[prompt][i]
        for number, each in enumerate(tasks)
        if number not in chosen
        for i in rng.permutation(len(each.examples[prompt]))[:UNKNOWN_RECORDS].tolist()
    ]
    for start in range(0, len(stream), BATCH_RECORDS):
        monitor.update(Batch((), tuple(stream[start : start + BATCH_RECORDS])))
    monitor.flush()
    state = monitor.released
    started = time.process_time()
    monitor.assign([input_of(known[0])], state)
    prepared = time.process_time()
    assigned = monitor.assign([input_of(each) for each in (*known, *unknown)], state)
    ended = time.process_time()
    return RequestScores(
        _p_values(assigned[: len(known)]), _p_values(assigned[len(known) :]), ended - prepared, prepared - started
    )


def _p_values(assigned: Sequence[Assignment]) -> list[float]:
    return [each.p_value for each in assigned]


def auroc(known: NDArray[np.float64], unknown: NDArray[np.float64]) -> float:
    """Probability that a value of `known` is larger than one of `unknown`, ties counted half (Mann-Whitney)."""
    ranks = rankdata(np.concatenate([known, unknown]))[: len(known)]
    return float((ranks.sum() - len(known) * (len(known) + 1) / 2) / (len(known) * len(unknown)))


def read_tasks(data: Path, others: Path, backbone: Path | None, limit: int) -> tuple[list[RequestTask], list[int]]:
    """The tasks of both sources, at most `limit` records of each, and the indices of those in `data`.

    Raises:
        UsageError: the folder or the file holds no task.
    """
    decoder, _ = text_decoder(backbone)
    form = to_record if backbone is None else to_chat
    rows_by_task = _rows_of_folder(data, limit)
    texts = {task: rows[:limit] for task, rows in read_texts(others).items() if len(rows) >= MIN_RECORDS}
    if not texts:
        raise UsageError(f"{others}: expected a task of at least {MIN_RECORDS} texts, found none; set --others")
    rows_by_task |= texts
    tasks = [
        RequestTask(
            name,
            {prompt: [decoder.decode_value(form(row, bare=prompt == "bare")) for row in rows] for prompt in PROMPTS},
        )
        for name, rows in rows_by_task.items()
    ]
    return tasks, list(range(len(_files(data))))


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.train.jsonl.gz"))
    if not files:
        raise UsageError(f"{folder} must hold task files NAME.train.jsonl.gz, found none; set the folder with --data")
    return files


def _rows_of_folder(folder: Path, limit: int) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for file in _files(folder):
        with gzip.open(file) as lines:
            found[file.name.split(".")[0]] = [orjson.loads(line) for line in islice(lines, limit)]
    return found


def table(result: Mapping[str, Any]) -> Table:
    """The metrics, one row per prompt and number of tasks."""
    shown = Table("prompt", "tasks", *COLUMNS, box=None, pad_edge=False)
    for prompt in PROMPTS:
        for number, values in result[prompt].items():
            shown.add_row(prompt, number, *(f"{values[name]:g}" for name in COLUMNS))
    return shown
