"""One process of `streamlearn bench distributed`.

1. On the quickstart's stream, one regime a task, in float32: `STEPS` steps by the leader alone, and twice by all
   processes. The weights are compared. Batches are larger than the quickstart's, which often have a single record.
2. On the same stream in batches of 16 records, in the faster dtype: the leader steps alone and with the others in
   turns, so that other load on the machine affects both alike.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import orjson
import torch
from torch import Tensor

from benchmarks.speed_arms import sample_batches
from streamlearn.adapters.presets import PRESETS, resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import choose, load, outline
from streamlearn.distributed.processes import Leader, follow, wait_for_load
from streamlearn.distributed.share import Channel, find_rank
from streamlearn.events import configure_logging
from streamlearn.learner.learner import Learner
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings, StreamSettings
from streamlearn.stream.batch import Batch
from streamlearn.stream.record import Example

STEPS = 60
SKIPPED = 20
"""Batches of the first task that are left out, so that the steps have three."""
COMPARED = StreamSettings(max_tokens=1024, batch_tokens=4096, batch_records=8)
TIMED = StreamSettings(max_tokens=1024, batch_tokens=8192, batch_records=16)
WAIT_S = 120.0
TASKS = 3
Dtype = Literal["auto", "float32", "bfloat16"]


def make_learner(folder: str | None, dtype: Dtype) -> Learner:
    """The default preset with a regime for each task."""
    settings = BackboneSettings(dtype=dtype, device="cpu")
    if folder is not None:
        settings = settings.model_copy(update={"model": folder})
    model = attach(load(settings, outline(settings)).model, resolve(AdapterSettings()), seed=0)
    learner = Learner(model, LearnerSettings(lr=1e-3), torch.device("cpu"), objective=PRESETS["streamlearn"].objective)
    for slot in range(TASKS):
        learner.add_regime(slot, seed=slot)
    return learner


@contextmanager
def led(channel: Channel, learner: Learner) -> Iterator[None]:
    """All processes train the learner inside the block."""
    leader = Leader(channel, beat_s=1.0, alive=lambda: True)
    leader.load("float32")
    leader.lead(learner)
    try:
        yield
    finally:
        leader.end()


def train(learner: Learner, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Train on each batch, in the regimes of its records' tasks; return the weights."""
    tasks: list[Any] = []
    for batch in batches:
        found = [orjson.loads(record.value or b"")["meta"]["task"] for record in batch.records]
        tasks += [task for task in dict.fromkeys(found) if task not in tasks]
        learner.step(batch.examples, [tasks.index(task) for task in found])
    names = learner.revisions
    return {f"{name}: {key}": tensor.clone() for name in names for key, tensor in learner.weights(name).items()}


def largest_difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor, in the Euclidean norm."""
    trained = [name for name in some if some[name].any()]
    return max(float((others[name] - some[name]).norm() / some[name].norm()) for name in trained)


def speeds(learner: Learner, batches: Sequence[Batch], rounds: int) -> list[tuple[float, float]]:
    """Tokens per second of steps by the leader alone and by all, in turns."""
    shared, found = learner.passes, []
    for number in range(rounds + 1):
        batch = batches[number % len(batches)]
        pair = []
        for passes in (learner.gradients, shared):
            learner.passes = passes
            pair.append(batch.num_tokens / seconds(learner, batch.examples))
        found.append((pair[0], pair[1]))
    return found[1:]  # the first round warms up


def seconds(learner: Learner, examples: Sequence[Example]) -> float:
    """Time a step."""
    started = time.perf_counter()
    learner.step(examples, [0] * len(examples))
    return time.perf_counter() - started


def lead(channel: Channel, folder: str | None, rounds: int) -> dict[str, Any]:
    """Measure; the other processes follow."""
    path = None if folder is None else Path(folder)
    batches = sample_batches(path, SKIPPED + STEPS, COMPARED)[SKIPPED:]
    alone = train(make_learner(folder, "float32"), batches)
    runs = []
    for _ in range(2):
        learner = make_learner(folder, "float32")
        with led(channel, learner):
            runs.append(train(learner, batches))
    learner = make_learner(folder, "auto")
    with led(channel, learner):
        pairs = speeds(learner, sample_batches(path, stream=TIMED), rounds)
    ratios = [together / one for one, together in pairs]
    low, _, high = quantiles(ratios, n=4)
    return {
        "processes": channel.place.size,
        "steps": len(batches),
        "weights_largest_relative_difference": largest_difference(alone, runs[0]),
        "bit_equal_between_two_runs": all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0]),
        "batch_tokens_of_speed": TIMED.batch_tokens,
        "dtype_of_speed": choose("auto", torch.device("cpu")).name,
        "alone_tokens_per_s": round(median(one for one, _ in pairs)),
        "together_tokens_per_s": round(median(together for _, together in pairs)),
        "together_over_alone": round(median(ratios), 3),
        "lower_quartile": round(low, 3),
        "upper_quartile": round(high, 3),
        "rounds": rounds,
    }


def main() -> None:
    """Run one process."""
    torch.set_num_threads(1)
    configure_logging("error")
    options = orjson.loads(sys.argv[1])
    channel = Channel(find_rank(os.environ), torch.device("cpu"), WAIT_S)
    if channel.place.leads:
        figures = lead(channel, options["folder"], options["rounds"])
        Path(options["out"]).write_bytes(orjson.dumps(figures))
    else:
        dtypes: tuple[Dtype, ...] = ("float32", "float32", "auto")
        for dtype in dtypes:
            learner = make_learner(options["folder"], dtype)
            assert wait_for_load(channel) is not None
            follow(channel, learner, lambda example, _: example)
    channel.close()


if __name__ == "__main__":
    main()
