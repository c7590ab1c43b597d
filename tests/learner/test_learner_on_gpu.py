"""Quantization, activation checkpointing and a divided backbone on a GPU; the same on a CPU is tested elsewhere."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.adapters.presets import PRESETS, resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.learner.learner import Learner
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings, Quantization
from tests.broker import free_ports
from tests.doubles import random_examples
from tests.learners import same, snapshot

GPU = "cuda"
RECORDS = random_examples([9, 4, 30, 12], prompt_length=2)
SLOTS = [0, 1, 0, 1]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Make = Callable[..., Learner]


@pytest.fixture
def make(tiny: Path) -> Make:
    return partial(learner_on, tiny)


@pytest.fixture
def one_process() -> Iterator[DeviceMesh]:
    """The mesh of a group of this process only."""
    (port,) = free_ports(1)
    backend = "nccl" if GPU == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield DeviceMesh(GPU, [0])
    dist.destroy_process_group()


def learner_on(
    folder: Path,
    device: str,
    *,
    dtype: Any = "float32",
    quantization: Quantization = "none",
    mesh: DeviceMesh | None = None,
    **settings: Any,
) -> Learner:
    """The default preset with two regimes, on the tiny backbone."""
    backbone = BackboneSettings(model=str(folder), dtype=dtype, device=device, quantization=quantization)
    loaded = load(backbone, outline(backbone), mesh=mesh)
    model = attach(loaded.model, resolve(AdapterSettings()), seed=0)
    router_lr = PRESETS["streamlearn"].objective.router_lr
    learner = Learner(
        model, LearnerSettings(**{"lr": 1e-2, **settings}), loaded.device, clock=lambda: 0.0, router_lr=router_lr
    )
    for slot in range(2):
        learner.add_regime(slot, seed=slot)
    return learner


def losses(learner: Learner) -> list[float]:
    """Of some steps, nats per token."""
    torch.manual_seed(0)
    return [learner.step(RECORDS, SLOTS).loss for _ in range(4)]


def test_a_step_is_that_of_a_cpu(make: Make) -> None:
    """Losses of the first steps in float32, up to rounding."""
    assert losses(make(GPU)) == pytest.approx(losses(make("cpu")), rel=1e-3)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantized_backbone_learns_as_on_a_cpu(make: Make, kind: Quantization) -> None:
    """The same weights are restored from what is stored."""
    found = losses(make(GPU, quantization=kind))
    assert found == pytest.approx(losses(make("cpu", quantization=kind)), rel=1e-3)
    assert found[-1] < found[0]


def test_checkpointing_changes_no_bit(make: Make) -> None:
    """Losses, weights and moments in float32."""
    kept, again = make(GPU), make(GPU, activation_checkpointing=True)
    assert losses(kept) == losses(again)
    assert same(snapshot(kept), snapshot(again))


def test_checkpointing_works_with_the_kernel_for_records_of_different_lengths(make: Make) -> None:
    """In bfloat16; its backward pass adds up in any order, so losses are equal up to rounding."""
    kept = make(GPU, dtype="bfloat16")
    assert losses(make(GPU, dtype="bfloat16", activation_checkpointing=True)) == pytest.approx(losses(kept), rel=2e-2)


def test_two_runs_are_equal_to_the_bit(make: Make) -> None:
    """What is resumed after a crash is what would have been learned without it."""
    one, other = make(GPU), make(GPU)
    assert losses(one) == losses(other)
    assert same(snapshot(one), snapshot(other))


def test_a_divided_backbone_in_one_process_changes_no_loss(make: Make, one_process: DeviceMesh) -> None:
    """FSDP2: its weights are gathered, computed with and released on the GPU."""
    learner = make(GPU, mesh=one_process)
    frozen: list[Tensor] = [weight for weight in learner.forward.parameters() if not weight.requires_grad]
    assert all(weight.device.type == GPU for weight in frozen)
    assert losses(learner) == pytest.approx(losses(make(GPU)), rel=1e-5)
