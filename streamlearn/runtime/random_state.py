"""The states of torch's generators, part of a snapshot: a router's noise is drawn from that of its device."""

from collections.abc import MutableMapping

import torch
from torch import Tensor

CPU, CUDA = "rng.torch", "rng.cuda"


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the CPU's generator, and of the GPU's where the model is on one: uint8, by name."""
    on_gpu = {CUDA: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {CPU: torch.get_rng_state(), **on_gpu}


def restore_random_state(tensors: MutableMapping[str, Tensor], device: torch.device) -> None:
    """Take the states out of a snapshot's tensors and set them; that of a GPU applies to a GPU only."""
    torch.set_rng_state(tensors.pop(CPU))
    on_gpu = tensors.pop(CUDA, None)
    if on_gpu is not None and device.type == "cuda":
        torch.cuda.set_rng_state(on_gpu, device)
