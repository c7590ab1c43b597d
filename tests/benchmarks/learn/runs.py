"""Made-up runs of format 2."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

Scores = Mapping[str, Sequence[float]]

END: Scores = {"a": [1, 0, 0, 0], "b": [1, 1, 1, 0], "c": [0.5, 0, 0, 0]}
AFTER: Scores = {"a": [1, 1, 1, 0], "b": [1, 1, 1, 0]}
METRICS = {"a": "exact_match", "b": "rouge_l", "c": "exact_match"}


def a_run(method: str, seed: int = 0, *, end: Scores = END, after: Scores = AFTER, **changes: Any) -> dict[str, Any]:
    """A run of two segments, tasks `a` and `b`, and the unseen task `c`, four scored records each; with changes.

    Without changes its AP is (0.25 + 0.75) / 2, its LA (0.75 + 0.75) / 2, AF 0.5, BWT -0.5, and ZST 0.125.
    """
    teacher = {task: {"accuracy": 0.5, "loss": 1.0} for task in end}
    in_order = not changes.get("shuffled")
    return {
        "format": 2,
        "suite": "two",
        "method": method,
        "seed": seed,
        "split": "test",
        "arm": method,
        "backbone": {"model": "tiny-model", "digest": "d1"},
        "profile": "tiny",
        "segments": [{"tasks": ["a"], "records": 20}, {"tasks": ["b"], "records": 20}],
        "unseen": [task for task in end if task not in after],
        "answers": {
            task: {
                "metric": METRICS.get(task, "exact_match"),
                "after": list(after[task]) if in_order and task in after else None,
                "end": list(scores),
                "texts": [""] * len(scores),
            }
            for task, scores in end.items()
        },
        "teacher": [teacher, teacher],
        "record_losses": [3.0] * 20 + [2.0] * 20,
        "shuffled": False,
        "detection": {"shifts": []},
        "activated_parameters": 10,
        "stored_parameters": 40,
        "seconds": 10.0,
        "tokens_per_s": 100.0,
        "peak_memory_mib": 1000.0,
        "device": "cpu",
        "config": {"seed": seed},
        "versions": {"commit": "0123456789abcdef", "torch": "2"},
        "dtype": "float32",
        **changes,
    }


def scored(
    method: str, seed: int, *, after: Scores, end: Scores, tasks: Sequence[str], **changes: Any
) -> dict[str, Any]:
    """A run over `tasks`, one after another, with 30 training records each."""
    teacher = [{task: {"accuracy": 0.5, "loss": 1.0} for task in end}] * len(tasks)
    segments = [{"tasks": [task], "records": 30} for task in tasks]
    return a_run(method, seed, end=end, after=after, **{"segments": segments, "teacher": teacher, **changes})


def drawn(
    method: str,
    seed: int,
    learned: float,
    forgets: float,
    zero_shot: float = 0.2,
    *,
    num_tasks: int = 8,
    num_unseen: int = 3,
    records: int = 50,
    **changes: Any,
) -> dict[str, Any]:
    """A run whose scores are drawn: each record is right with probability `learned`, then `learned - forgets`.

    The difficulty of a record is common to all methods and seeds.
    """
    tasks = [f"task {number + 1}" for number in range(num_tasks)]
    unseen = [f"unseen {number + 1}" for number in range(num_unseen)]
    after, end = {}, {}
    noise = np.random.default_rng([seed, *method.encode()])
    for place, task in enumerate([*tasks, *unseen]):
        hard_N = np.clip(np.random.default_rng(place).random(records) + noise.normal(0, 0.1, records), 0, 1)
        if task in unseen:
            end[task] = (hard_N < zero_shot).astype(float).tolist()
            continue
        after[task] = (hard_N < learned).astype(float).tolist()
        lost = forgets if place < num_tasks - 1 else 0.0
        end[task] = (hard_N < learned - lost).astype(float).tolist()
    segment = np.exp(-np.arange(30) / 8)
    losses = np.concatenate([2 - learned + 2 * segment for _ in tasks]) + noise.normal(0, 0.3, 30 * num_tasks)
    changes = {"record_losses": losses.round(4).tolist(), "suite": "eight", **changes}
    return scored(method, seed, after=after, end=end, tasks=tasks, **changes)


def write(folder: Path, *runs: Mapping[str, Any]) -> Path:
    """Write the runs where `bench learn` would."""
    for run in runs:
        file = folder / run["suite"] / f"{run['method'].replace(' ', '-')}.{run['seed']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(orjson.dumps(run))
    return folder
