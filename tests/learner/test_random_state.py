"""What is drawn after a restart is what would have been drawn."""

import pytest
import torch
from torch import Tensor

from streamlearn.learner.memory import CPU, CUDA, random_state, restore_random_state

ON_CPU, ON_GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, Tensor]:
    """The states of generators on GPUs, device -> state."""
    states = {ON_GPU: torch.tensor([1, 2], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    return states


def test_the_next_draw_is_repeated() -> None:
    """And the state is taken out of the tensors, whose other names are the learner's."""
    tensors = {**random_state(ON_CPU), "A": torch.zeros(1)}
    drawn = torch.rand(4)
    restore_random_state(tensors, ON_CPU)
    assert torch.equal(torch.rand(4), drawn)
    assert [*tensors] == ["A"]


def test_a_gpus_generator_is_restored_too(gpu: dict[torch.device, Tensor]) -> None:
    """That of the model's device."""
    tensors = random_state(ON_GPU)
    assert [*tensors] == [CPU, CUDA]
    saved, gpu[ON_GPU] = gpu[ON_GPU], torch.zeros(2, dtype=torch.uint8)
    restore_random_state(tensors, ON_GPU)
    assert torch.equal(gpu[ON_GPU], saved)


def test_a_snapshot_moves_between_devices(gpu: dict[torch.device, Tensor]) -> None:
    """A GPU keeps its generator where the snapshot is of a CPU, and a CPU has no use for a GPU's."""
    before = gpu[ON_GPU]
    restore_random_state(random_state(ON_CPU), ON_GPU)
    assert gpu[ON_GPU] is before
    tensors = random_state(ON_GPU)
    restore_random_state(tensors, ON_CPU)
    assert not tensors


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_next_draw_on_a_gpu_is_repeated() -> None:
    """With torch's own generators."""
    device = torch.device("cuda")
    tensors = random_state(device)
    drawn = torch.rand(4, device=device)
    restore_random_state(tensors, device)
    assert torch.equal(torch.rand(4, device=device), drawn)
