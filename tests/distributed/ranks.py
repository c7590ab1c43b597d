"""Several processes that train on the same batches, and the weights they end with.

Each has rank, size and port in its environment, as torchrun sets them.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.distributed import find_rank
from streamlearn.distributed.channel import Channel
from streamlearn.distributed.processes import Leader, follow, wait_for_load
from streamlearn.learner.evaluate import prompt_of, run_to_end
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner, Rehearsal
from streamlearn.stream.record import Example
from tests.broker import free_ports
from tests.forked import ForkedProcess
from tests.learners import REGIMES, snapshot, tiny_learner

PRESETS = ("streamlearn", "streamlearn-routed", "cp-moe", "loramoe", "mot")
CHANGES = {"cp-moe": {"balance_strength": 0.0}}
"""The balance loss is that of the records of a pass: of a process, as of a part, and not of the batch."""
STEPS = 9
WAIT_S = 60.0


def batches(steps: int = STEPS) -> Iterator[tuple[list[Example], list[int]]]:
    """Batches of one to six records of different lengths, and the regime of each record; always the same."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        records = []
        for length in rng.integers(4, 40, size=rng.integers(1, 7)):
            ids = rng.integers(1, 200, size=length).astype(np.int32)
            records.append(Example(ids, np.where(np.arange(length) < 2, -100, ids).astype(np.int32)))
        yield records, rng.integers(0, REGIMES, size=len(records)).tolist()


def train(learner: Learner) -> dict[str, Tensor]:
    """Take the steps and return everything that they changed, with their losses."""
    losses: list[float] = []
    for number, (examples, slots) in enumerate(batches()):
        again = [Rehearsal(examples[:1], slots[:1]), Rehearsal(examples[-1:], slots[-1:])] if number % 3 == 1 else ()
        step = learner.step(examples, slots if learner.routes_by_regime else None, rehearsed=again)
        losses += [step.loss, step.grad_norm, *step.record_losses, *map(float, step.record_correct)]
        if learner.per_regime and number == STEPS // 2:  # the others must notice both
            learner.remove_regime(1)
            learner.add_regime(1, seed=7, start=2)
        if number % 4 == 0:  # between the steps, by the leader alone
            losses += learner.measure(examples, slots)
            losses += scores(learner, examples, slots)
    return {**snapshot(learner), "losses": torch.tensor(losses)}


def scores(learner: Learner, examples: Sequence[Example], slots: Sequence[int]) -> list[float]:
    """Losses in several passes: under regimes, under a mean of two and the backbone, and under pinned weights."""
    pinned = learner.pin()
    learner.step(examples, slots if learner.routes_by_regime else None)
    means: list[Slot] = [(0, 2) if slot else NO_REGIME for slot in slots]
    passes = run_to_end(learner.score(examples, slots, pack_tokens=40))
    passes += run_to_end(learner.score(examples, means if learner.per_regime else slots, pack_tokens=40))
    with pinned.swapped_in():
        passes += run_to_end(learner.score(examples, slots, pack_tokens=40))
    numbers = [number for score in passes for number in (score.loss_sum, float(score.correct), float(score.tokens))]
    prompts, regimes = [prompt_of(examples[0])], slots[:1] if learner.routes_by_regime else None
    [tokens] = run_to_end(decode(learner.model, prompts, [6], frozenset(), learner.device, regimes))
    return [*numbers, *map(float, tokens)]


def bytes_of_backbone(learner: Learner) -> int:
    """What this process has of the backbone, but for the norm after its last layer."""
    norm = set(map(id, learner.forward.get_decoder().norm.parameters()))
    frozen = [weight for weight in learner.forward.parameters() if not weight.requires_grad and id(weight) not in norm]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in frozen]
    return sum(weight.untyped_storage().nbytes() for weight in local)


def run_ranks(
    backbone: Path, out: Path, size: int, presets: Sequence[str] = PRESETS, *, shard: bool = False
) -> dict[str, Tensor]:
    """Train in `size` processes with one thread each; return what the leader has at the end, by preset and name."""
    (port,) = free_ports(1)
    environ = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs = [out.with_suffix(f".{rank}.log") for rank in range(size)]
    processes = [
        ForkedProcess(
            main, backbone, out, presets, shard, stderr=log, env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait(timeout=300) for process in processes]
    assert codes == [0] * size, "\n".join(log.read_text() for log in logs)
    return load_file(out)


def main(backbone: Path, out: Path, presets: Sequence[str], shard: bool) -> None:
    """One process."""
    torch.set_num_threads(1)
    place = find_rank(os.environ)
    channel = Channel(place, torch.device("cpu"), WAIT_S, shard=shard)
    results: dict[str, Tensor] = {}
    for preset in presets:
        make = partial(tiny_learner, backbone, preset=preset, changes=CHANGES.get(preset), mesh=channel.mesh)
        if not place.leads:
            assert wait_for_load(channel) == "float32"
            follow(channel, make(), lambda example, _: example)
            continue
        leader = Leader(channel, beat_s=0.05, alive=lambda: True)
        leader.load("float32")
        learner = make(compute=leader.compute)
        torch.manual_seed(0)
        leader.lead(learner)
        results |= {f"{preset}: {name}": tensor for name, tensor in train(learner).items()}
        results[f"{preset}: bytes of the backbone"] = torch.tensor(bytes_of_backbone(learner))
        leader.end()
    channel.close()
    if place.leads:
        save_file(results, out)
