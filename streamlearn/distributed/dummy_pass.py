"""Passes that compute nothing of use, where the backbone is divided among processes (`backbone.shard`).

A layer's weights are gathered by all processes at a time. When one of them makes a pass alone, to score records or to
generate, or has more parts of a batch than the others, these make a pass over one token meanwhile.
"""

import numpy as np
import torch

from streamlearn.adapters.config import slot_of
from streamlearn.adapters.routing_context import routing_context
from streamlearn.errors import RankLostError
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.packing import pack
from streamlearn.stream.decode import Example
from streamlearn.stream.encode import IGNORED

_TOKENS = Example(np.zeros(2, dtype=np.int32), np.array([IGNORED, 0], dtype=np.int32))


def out_of_step(error: Exception) -> RankLostError:
    """The error of a process whose memory ran out while the others wait for its part of a layer."""
    reason = " ".join(str(error).split())[:160]
    return RankLostError(
        f"with backbone.shard, a pass that begins must be finished by all processes; memory ran out in one: {reason}; "
        "lower stream.batch_tokens, or set learner.activation_checkpointing"
    )


def dummy_pass(learner: Learner, *, with_gradient: bool) -> None:
    """Make a pass, and its backward pass too; weights, gradients and loads stay as they are."""
    parameters = learner.optimizer.parameters()
    gradients = [parameter.grad for parameter in parameters]
    loads = [bank.load_HK.clone() if bank.load_HK is not None else None for bank in learner.banks]
    slots = [slot_of(next(iter(learner.revisions)))] if learner.per_regime else None
    packed = pack([_TOKENS], learner.device, slots)
    with torch.set_grad_enabled(with_gradient), routing_context(learner.model, packed.context()):
        loss = packed_loss(learner.forward, packed)
    if with_gradient:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(loss.mean)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for bank, load in zip(learner.banks, loads, strict=True):
        if load is not None and bank.load_HK is not None:
            bank.load_HK.copy_(load)
