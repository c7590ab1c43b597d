"""What a run cost: parameters, time and memory."""

import resource
from typing import Any

import torch
from torch.nn import Parameter

from streamlearn.adapters.check import activated_parameters
from streamlearn.adapters.tuner import Bank
from streamlearn.backbone.load import outline
from streamlearn.daemon.model import Model, adapter_of
from streamlearn.settings import Settings


def parameters_of(model: Model, settings: Settings) -> dict[str, int]:
    """Return the adapter's parameters that act on a token, and all that it stores."""
    return {
        "activated_parameters": activated_parameters(adapter_of(settings), outline(settings.backbone).linears),
        "stored_parameters": sum(each.numel() for bank in model.learner.banks for each in _parameters_of(bank)),
    }


def _parameters_of(bank: Bank) -> list[Parameter]:
    """Experts and router of a linear, frozen or not."""
    return [bank.A, bank.B, *([] if bank.router is None else [bank.router])]


def cost_of(model: Model, tokens: int, seconds: float) -> dict[str, Any]:
    """Return training time and throughput, without evaluation, and the peak memory of the device's process.

    Args:
        model: The trained model.
        tokens: Tokens that were trained on.
        seconds: Time of training.
    """
    device = model.learner.device
    on_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else _resident_mib()
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if tokens else None,
        "peak_memory_mib": peak,
        "device": f"cuda: {torch.cuda.get_device_name(device)}" if on_gpu else device.type,
    }


def _resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
