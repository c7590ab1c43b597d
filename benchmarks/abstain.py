"""Novelty detection: requests of tasks that were in the stream, and of tasks that were not.

    python -m benchmarks.abstain --json

Tasks are drawn at random; a monitor reads up to `TRAIN_RECORDS` records of each, one task after another, and then
classifies records that were not in the stream: the remaining ones of the same tasks (known) and records of tasks that
were not drawn (unknown). The monitor gets no task labels. Only training files are read. The metrics:

- auroc: probability that a known request has a larger p-value than an unknown one; ties count half
- known_rejected: share of the known requests that match no regime, at most the level if it is calibrated
- unknown_detected: share of the unknown requests that match no regime
- ms_per_request: processor time to classify a request; classifier_ms: to prepare for a new state of the memory

`superni` are all tasks of `--data` together, which are less alike than tasks drawn at random: among those are groups
that differ in one word of the definition, and by bare inputs some cannot be told apart at all.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.data import Row, read_texts, to_chat, to_record
from benchmarks.measuring import OTHERS, SHARED, command, grid, parser, show
from benchmarks.streams import PROMPTS, Prompt, Task, read_folder, run_monitor, text_decoder, to_task
from streamlearn.errors import UsageError
from streamlearn.settings import ServeSettings, ShiftSettings
from streamlearn.shift.features import input_of
from streamlearn.shift.monitor import Monitor
from streamlearn.stream.record import Example

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
SEED = 0xAB
COLUMNS = ("streams", "known", "unknown", "auroc", "known_rejected", "unknown_detected", "ms_per_request")


@dataclass
class RequestScores:
    """The p-values of the requests of one stream, or of several together."""

    known: list[float]
    unknown: list[float]
    request_s: float = 0.0
    classifier_s: float = 0.0
    streams: int = 1

    def __add__(self, other: "RequestScores") -> "RequestScores":
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


def measure(data: Path, others: Path, backbone: Path | None) -> dict[str, Any]:
    """Return the metrics by prompt and number of tasks."""
    tasks, suite = read_tasks(data, others, backbone, limit=TRAIN_RECORDS + KNOWN_RECORDS)
    level = ServeSettings().max_known_rejected
    draws = {number: draws for number, draws in DRAWS.items() if number < len(tasks)}
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


def _drawn(tasks: Sequence[Task], prompt: Prompt, number: int, draws: int) -> RequestScores:
    """Several streams of `number` tasks each."""
    outcomes = []
    for draw in range(draws):
        rng = np.random.default_rng([SEED, number, draw])
        outcomes.append(run(tasks, rng.permutation(len(tasks))[:number].tolist(), prompt, rng))
    return sum(outcomes[1:], start=outcomes[0])


def run(tasks: Sequence[Task], chosen: Sequence[int], prompt: Prompt, rng: np.random.Generator) -> RequestScores:
    """Let a monitor read the chosen tasks, and classify requests of all."""
    stream: list[Example] = []
    known: list[Example] = []
    for task in chosen:
        examples = tasks[task].examples[prompt]
        order = rng.permutation(len(examples)).tolist()
        cut = min(TRAIN_RECORDS, 2 * len(order) // 3)
        stream += [examples[i] for i in order[:cut]]
        known += [examples[i] for i in order[cut : cut + KNOWN_RECORDS]]
    unknown = [
        task.examples[prompt][i]
        for number, task in enumerate(tasks)
        if number not in chosen
        for i in rng.permutation(len(task.examples[prompt]))[:UNKNOWN_RECORDS].tolist()
    ]
    monitor = Monitor(ShiftSettings(max_regimes=256), seed=0)
    run_monitor(monitor, stream)
    monitor.trained = monitor.state
    started = time.process_time()
    monitor.assign([input_of(known[0])])
    prepared = time.process_time()
    assigned = monitor.assign([input_of(request) for request in (*known, *unknown)])
    p_values, ended = [one.p_value for one in assigned], time.process_time()
    return RequestScores(p_values[: len(known)], p_values[len(known) :], ended - prepared, prepared - started)


def auroc(known: NDArray[np.float64], unknown: NDArray[np.float64]) -> float:
    """Probability that a value of `known` is larger than one of `unknown`, ties counted half (Mann-Whitney)."""
    ranks = rankdata(np.concatenate([known, unknown]))[: len(known)]
    return float((ranks.sum() - len(known) * (len(known) + 1) / 2) / (len(known) * len(unknown)))


def read_tasks(data: Path, others: Path, backbone: Path | None, limit: int) -> tuple[list[Task], list[int]]:
    """Return the tasks of both sources, at most `limit` records of each, and the indices of those in `data`.

    Raises:
        UsageError: the folder or the file holds no task.
    """
    decoder, _ = text_decoder(backbone)
    form = to_record if backbone is None else to_chat
    own = read_folder(data, limit)
    texts = {task: rows[:limit] for task, rows in read_texts(others).items() if len(rows) >= MIN_RECORDS}
    if not texts:
        raise UsageError(f"{others}: expected a task of at least {MIN_RECORDS} texts, found none; set --others")
    bare = partial(form, bare=True)
    rows_by_task: dict[str, Sequence[Row]] = {**own, **texts}
    tasks = [to_task(name, rows, decoder, form, bare) for name, rows in rows_by_task.items()]
    return tasks, list(range(len(own)))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, default=SHARED / "superni", help="folder of SuperNI task files")
    options.add_argument("--others", type=Path, default=OTHERS, help="file of texts of other tasks")
    options.add_argument("--backbone", type=Path, help="folder of a model whose tokenizer is used, by default nano")
    given = options.parse_args()
    result = measure(given.data, given.others, given.backbone)
    rows = {f"{prompt} {name}": values for prompt in PROMPTS for name, values in result[prompt].items()}
    show(result, grid(rows, COLUMNS, "prompt and tasks"), as_json=given.json)


if __name__ == "__main__":
    command(main)
