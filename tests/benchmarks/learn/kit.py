"""Made-up runs of format 3, made-up suites, a decoder with one token per letter, and two random tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from benchmarks.learn.baselines import Baseline, BaselineContext
from benchmarks.learn.scores import Metric, Reference
from benchmarks.learn.suites import Json, TaskRecords
from streamlearn.adapters.context import routing_context
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.settings import Settings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import IGNORED, Example
from tests.doubles import random_examples

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
        "format": 3,
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
                "texts_after": [""] * len(scores) if in_order and task in after else None,
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


def write(folder: Path, *runs: Mapping[str, Any]) -> Path:
    """Write the runs where `python -m benchmarks.learn run` would."""
    for run in runs:
        file = folder / run["suite"] / f"{run['method'].replace(' ', '-')}.{run['seed']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(orjson.dumps(run))
    return folder


def references(*answers: str) -> tuple[Reference, ...]:
    return tuple(Reference((answer,)) for answer in answers)


def record(prompt: str, answer: str) -> Json:
    return {"prompt": prompt, "completion": answer, "meta": {"task": "t"}}


def task_of(
    train: Sequence[Json],
    scored: Sequence[Json] = (),
    metric: Metric = "exact_match",
) -> TaskRecords:
    """A task whose references are the records' answers."""

    def answers(records: Sequence[Json]) -> tuple[Reference, ...]:
        return references(*(str(record.get("completion", "a")) for record in records))

    return TaskRecords(tuple(train), answers(train), tuple(scored), answers(scored), metric)


class LetterDecoder(Decoder):
    """Tokens are the letters' code points; nothing is added and nothing truncated."""

    def __init__(self) -> None:
        """No tokenizer is needed."""

    def decode_value(self, value: Mapping[str, Any]) -> Example:
        """Decode prompt and completion, or two messages."""
        if "messages" in value:
            prompt, answer = (message["content"] for message in value["messages"])
        else:
            prompt, answer = value["prompt"], value["completion"]
        ids = [ord(letter) for letter in prompt + answer]
        labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
        return Example(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))

    @property
    def stop(self) -> frozenset[int]:
        """One letter ends an answer."""
        return frozenset({ord("#")})

    def text(self, ids: Sequence[int]) -> str:
        """Join the letters."""
        return "".join(map(chr, ids))


ONE, TWO = random_examples((9, 7, 8), seed=1), random_examples((8, 8, 6), seed=2)


def context_of(learner: Learner, **fields: Any) -> BaselineContext:
    """What a baseline is built from: two segments of different tasks."""
    settings = fields.pop("settings", None) or Settings(
        source={"jsonl": {"path": "s"}}, seed=fields.pop("seed", 0), holdout={"records_per_regime": 40}
    )
    return BaselineContext(**{"learner": learner, "settings": settings, "slots": [[0], [1]], "records": 12, **fields})


def loss_on(learner: Learner, examples: tuple[Example, ...]) -> float:
    """The learner's mean loss per token."""
    packed = pack(examples, learner.device)
    with torch.no_grad(), routing_context(learner.model, packed.context()):
        return float(packed_loss(learner.forward, packed).mean)


def learn(baseline: Baseline, *tasks: tuple[Example, ...], steps: int = 12) -> None:
    """Train on one task after another, each as one segment of equal batches."""
    for number, examples in enumerate(tasks):
        baseline.begin(number, examples)
        for _ in range(steps):
            baseline.step(examples)
        baseline.end(number, examples)
