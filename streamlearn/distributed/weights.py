"""Weights from the leader to the others.

The leader alone makes updates, so it sends what has changed since an adapter was last sent: as many bytes as the second
half of an all-reduce. The others then have its bits, and need no optimizer state to compute the next gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamlearn.distributed.channel import Channel
from streamlearn.learner.learner import Learner


def send(channel: Channel, learner: Learner, adapters: Sequence[str], slots: Sequence[int]) -> None:
    """Send adapters, and the CP biases of regime slots."""
    tensors = [*(tensor for name in adapters for tensor in learner.weights(name).values()), *_biases(learner, slots)]
    if tensors:
        channel.spread(torch.cat([tensor.detach().flatten() for tensor in tensors]))


@torch.no_grad()
def receive(channel: Channel, learner: Learner, adapters: Sequence[str], slots: Sequence[int]) -> None:
    """Take over what `send` sends; the learner has all of the adapters."""
    own = {name: learner.weights(name) for name in adapters}
    biases = _biases(learner, slots)
    tensors = [*(tensor for weights in own.values() for tensor in weights.values()), *biases]
    if not tensors:
        return
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), device=channel.device)
    channel.spread(flat)
    parts = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
    for name, weights in own.items():
        learner.load_weights(name, {key: next(parts).view(tensor.shape) for key, tensor in weights.items()})
    for bias in biases:
        bias.copy_(next(parts).view(bias.shape))


def _biases(learner: Learner, slots: Sequence[int]) -> list[Tensor]:
    """CP biases of the slots, views of each bank's (H, K, N)."""
    return [bank.bias_HKN[:, :, slot] for bank in learner.banks if bank.bias_HKN is not None for slot in slots]
