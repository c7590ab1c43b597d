"""One process's share of a step, and the sum of all shares.

    g = sum_r sum_(i in share r) (n_i / n) grad L_i,     n_i learned tokens of part i, n of the batch          (1)

This is eq. (1) of `learner.memory` over processes instead of parts. Each process computes its terms; the leader gets
the sum, clips it and makes the update. Loads and per-record results travel in the same tensor.

Where the backbone is divided among processes (`backbone.shard`), all processes gather the weights of a layer together.
When one makes a pass on its own, or has more parts of a batch, the others make a pass over one token meanwhile.
"""
# Shape suffixes: B records of the batch.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamlearn.adapters.context import routing_context
from streamlearn.adapters.presets import slot_of
from streamlearn.distributed.channel import Channel
from streamlearn.errors import RankLostError
from streamlearn.learner.learner import Learner, PassTotals
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.learner.memory import is_out_of_memory
from streamlearn.learner.optimizer import parameters_of
from streamlearn.stream.record import IGNORED, Example


@dataclass(frozen=True)
class Share:
    """The part of a batch that one process computes."""

    own: Sequence[int]
    """Indices of its records, ascending."""
    examples: Sequence[Example]
    """These records."""
    slots: Sequence[int] | None
    """Their regime slots."""
    parts: int
    """Forward passes of each process."""
    num_records: int
    """Records of the batch."""
    learned: int
    """Learned tokens of the batch."""


def compute(channel: Channel, learner: Learner, share: Share, on_record: Callable[[int], None]) -> PassTotals:
    """Compute a share with the active adapters, and add up all shares.

    Afterwards the leader's parameters have the gradients of the batch; the others' have none.

    Returns:
        The results of the batch, in the leader; in the others, of their share.

    Raises:
        torch.OutOfMemoryError: a process ran out of memory, this one or another; no gradient is left.
    """
    totals, fault = _own(learner, share, on_record, in_step=channel.mesh is not None)
    parameters = parameters_of(learner.optimizer.active)
    state = [fault is not None, *(parameter.grad is not None for parameter in parameters)]
    states = channel.exchange(np.array(state))
    if states[:, 0].any():
        learner.optimizer.zero_grad()
        ranks = ", ".join(map(str, np.flatnonzero(states[:, 0])))
        raise torch.OutOfMemoryError(f"rank {ranks} ran out of memory{': ' if fault else ''}{fault or ''}")
    with_gradient = [parameters[index] for index in np.flatnonzero(states[:, 1:].any(0))]
    loads = [bank.load_HK for bank in learner.active_banks if bank.load_HK is not None]
    results = _results(totals, share, learner.device)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in with_gradient]
    flat = torch.cat([tensor.flatten().float() for tensor in (results, *loads, *gradients)])
    channel.add_up(flat)
    if not channel.place.leads:
        learner.optimizer.zero_grad()
        return totals
    summed = torch.split(flat, [tensor.numel() for tensor in (results, *loads, *gradients)])
    for load, total in zip(loads, summed[1:], strict=False):
        load.copy_(total.view(load.shape))
    for parameter, total in zip(with_gradient, summed[1 + len(loads) :], strict=True):
        parameter.grad = total.view(parameter.shape)
    loss, losses_B, right_B = torch.split(summed[0], [1, share.num_records, share.num_records])
    return PassTotals(means=[loss[0]], weights=[1.0], losses=[losses_B], right=[right_B])


def _own(
    learner: Learner, share: Share, on_record: Callable[[int], None], *, in_step: bool
) -> tuple[PassTotals, str | None]:
    """Return the results of the share, and how memory ran out, if it did.

    `in_step`: all processes make the same number of passes.
    """
    totals, parts = PassTotals(), min(share.parts, len(share.examples))
    try:
        if parts:
            totals = learner.gradients(
                share.examples, share.slots, parts, lambda index: on_record(share.own[index]), learned=share.learned
            )
        else:
            for bank in learner.active_banks:
                bank.reset_load()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if in_step:
            raise out_of_step(error) from error
        return PassTotals(), " ".join(str(error).split())[:160]
    for _ in range(share.parts - parts if in_step else 0):
        dummy_pass(learner, with_gradient=True)
    return totals, None


def _results(totals: PassTotals, share: Share, device: torch.device) -> Tensor:
    """Return loss, losses and correct answers of the share, each at its record's index in the batch, (1 + 2 B,)."""
    results = torch.zeros(1 + 2 * share.num_records, device=device)
    if share.own and totals.means:
        own = torch.tensor(share.own).to(device, non_blocking=True)
        weights = torch.tensor(totals.weights).to(device, non_blocking=True)
        results[0] = (torch.stack(totals.means) * weights).sum()
        results[1 + own] = torch.cat(totals.losses)
        results[1 + share.num_records + own] = torch.cat(totals.right)
    return results


def shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Divide records so that the processes have nearly equal numbers of tokens.

    The longest unassigned record goes to the process with the fewest tokens (Graham 1969, LPT: at most 4/3 of the
    best division's largest share).

    Args:
        lengths: Tokens of each record.
        size: Number of processes.

    Returns:
        The indices of each process, ascending; empty where there are fewer records than processes.
    """
    by_rank: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = tokens.index(min(tokens))
        by_rank[rank].append(index)
        tokens[rank] += lengths[index]
    return [sorted(indices) for indices in by_rank]


_TOKENS = Example(np.zeros(2, dtype=np.int32), np.array([IGNORED, 0], dtype=np.int32))


def out_of_step(error: Exception) -> RankLostError:
    """Return the error of a process that ran out of memory while the others wait for its part of a layer."""
    reason = " ".join(str(error).split())[:160]
    return RankLostError(
        f"with backbone.shard, a pass that begins must be finished by all processes; memory ran out in one: {reason}; "
        "lower stream.batch_tokens, or set learner.activation_checkpointing"
    )


def dummy_pass(learner: Learner, *, with_gradient: bool) -> None:
    """Make a forward pass, and a backward pass `with_gradient`; weights, gradients and loads stay unchanged."""
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
