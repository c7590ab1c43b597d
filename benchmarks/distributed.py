"""Training in several processes on this machine's CPU, one thread each: are the weights the same, and how fast is it?

    python -m benchmarks.distributed --json

1. On the quickstart's stream, one regime a task, in float32: `STEPS` steps by the leader alone, and twice by all
   processes. The weights are compared. Batches are larger than the quickstart's, which often have a single record.
2. On the same stream in batches of 16 records, in the faster dtype: the leader steps alone and with the others in
   turns, so that other load on the machine affects both alike.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Literal

import orjson
import torch
from torch import Tensor

from benchmarks.measuring import MeasurementError, command, grid, parser, positive, show
from benchmarks.speed_arms import sample_batches
from streamlearn.adapters.presets import PRESETS, resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import choose, load, outline
from streamlearn.distributed import find_rank
from streamlearn.distributed.channel import Channel
from streamlearn.distributed.processes import Leader, follow, wait_for_load
from streamlearn.learner.learner import Compute, Learner, PassTotals
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings, StreamSettings
from streamlearn.stream.record import Batch, Example

STEPS = 60
SKIPPED = 20
"""Batches of the first task that are left out, so that the steps have three."""
COMPARED = StreamSettings(max_tokens=1024, batch_tokens=4096, batch_records=8)
TIMED = StreamSettings(max_tokens=1024, batch_tokens=8192, batch_records=16)
WAIT_S = 120.0
TASKS = 3
Dtype = Literal["auto", "float32", "bfloat16"]


def make_learner(folder: str | None, dtype: Dtype, compute: Compute | None = None) -> Learner:
    """The default preset with a regime for each task."""
    settings = BackboneSettings(dtype=dtype, device="cpu")
    if folder is not None:
        settings = settings.model_copy(update={"model": folder})
    model = attach(load(settings, outline(settings)).model, resolve(AdapterSettings()), seed=0)
    router_lr = PRESETS["streamlearn"].objective.router_lr
    learner = Learner(model, LearnerSettings(lr=1e-3), torch.device("cpu"), router_lr=router_lr, compute=compute)
    for slot in range(TASKS):
        learner.add_regime(slot, seed=slot)
    return learner


@dataclass
class Shares:
    """The `compute` of a learner whose steps are shared out, or made by the leader on its own."""

    leader: Leader
    alone: bool = False

    def __call__(self, learner: Learner, *arguments: Any) -> PassTotals:
        """Compute the gradients of a batch."""
        return (Learner.gradients if self.alone else self.leader.compute)(learner, *arguments)


@contextmanager
def led(channel: Channel, folder: str | None, dtype: Dtype) -> Iterator[tuple[Shares, Learner]]:
    """A learner that all processes train inside the block."""
    leader = Leader(channel, beat_s=1.0, alive=lambda: True)
    shares = Shares(leader)
    leader.load("float32")
    learner = make_learner(folder, dtype, shares)
    leader.lead(learner)
    try:
        yield shares, learner
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


def speeds(shares: Shares, learner: Learner, batches: Sequence[Batch], rounds: int) -> list[tuple[float, float]]:
    """Tokens per second of steps by the leader on its own and by all, in turns."""
    pairs = []
    for number in range(rounds + 1):
        batch = batches[number % len(batches)]
        pair = []
        for shares.alone in (True, False):
            pair.append(batch.num_tokens / seconds(learner, batch.examples))
        pairs.append((pair[0], pair[1]))
    return pairs[1:]  # the first round warms up


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
        with led(channel, folder, "float32") as (_, learner):
            runs.append(train(learner, batches))
    with led(channel, folder, "auto") as (shares, learner):
        pairs = speeds(shares, learner, sample_batches(path, stream=TIMED), rounds)
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


def take_part(folder: str | None, rounds: int, out: str) -> None:
    """Be one of the processes; the leader writes the result."""
    torch.set_num_threads(1)
    channel = Channel(find_rank(os.environ), torch.device("cpu"), WAIT_S)
    if channel.place.leads:
        Path(out).write_bytes(orjson.dumps(lead(channel, folder, rounds)))
    else:
        dtypes: tuple[Dtype, ...] = ("float32", "float32", "auto")
        for dtype in dtypes:
            learner = make_learner(folder, dtype)
            assert wait_for_load(channel) is not None
            follow(channel, learner, lambda example, _: example)
    channel.close()


def measure(*, processes: int, rounds: int, folder: Path | None) -> dict[str, Any]:
    """Run the processes and return the leader's result.

    Args:
        processes: How many take part.
        rounds: Steps of each kind whose speeds are compared.
        folder: Of a causal language model; None: the bundled one.

    Raises:
        MeasurementError: a process failed.
    """
    with TemporaryDirectory(prefix="streamlearn-") as scratch:
        out = Path(scratch) / "result.json"
        options = {"rounds": rounds, "folder": None if folder is None else str(folder), "out": str(out)}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "benchmarks.distributed", orjson.dumps(options).decode()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise MeasurementError(f"a process of the measurement failed: {done.stderr[-2000:]}")
        result: dict[str, Any] = orjson.loads(out.read_bytes())
        return result


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        take_part(**orjson.loads(sys.argv[1]))
        return
    options = parser(__doc__)
    options.add_argument("--processes", type=positive, default=2, help="processes, one thread each")
    options.add_argument("--rounds", type=positive, default=24, help="pairs of steps whose speeds are compared")
    options.add_argument("--backbone", type=Path, help="folder of a causal language model; by default nano")
    given = options.parse_args()
    result = measure(processes=given.processes, rounds=given.rounds, folder=given.backbone)
    rows = {name.replace("_", " "): {"value": value} for name, value in result.items()}
    show(result, grid(rows, ["value"]), as_json=given.json)


if __name__ == "__main__":
    command(main)
