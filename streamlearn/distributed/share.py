"""One process's share of a step, and the sum of all shares.

    g = sum_r sum_(i in share r) (n_i / n) grad L_i,     n_i learned tokens of part i, n of the batch          (1)

`oom_retry` eq. (1) over processes instead of parts. Each computes its terms; the leader gets the sum, clips it and
makes the update. The sum of loads and the records' figures travel in the same tensor.
"""
# Shape suffixes: B records of the batch.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamlearn.distributed.channel import Channel
from streamlearn.distributed.dummy_pass import dummy_pass, out_of_step
from streamlearn.learner.learner import Learner
from streamlearn.learner.oom_retry import is_out_of_memory
from streamlearn.learner.optimizer import parameters_of
from streamlearn.learner.passes import PassTotals
from streamlearn.stream.decode import Example


@dataclass(frozen=True)
class Share:
    """What one process computes of a batch."""

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
    tokens: int
    """Tokens of the batch."""
    learned: int
    """Learned tokens of the batch."""


def compute(channel: Channel, learner: Learner, share: Share, on_record: Callable[[int], None]) -> PassTotals:
    """Compute a share, of the adapters that are active, and add up all shares.

    Afterwards the leader's parameters have the gradients of the batch, and those of the others none.

    Returns:
        The figures of the batch; of use in the leader only.

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
    figures = _figures(totals, share, learner.device)
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in with_gradient]
    flat = torch.cat([tensor.flatten().float() for tensor in (figures, *loads, *gradients)])
    channel.add_up(flat)
    if not channel.place.leads:
        learner.optimizer.zero_grad()
        return totals
    summed = torch.split(flat, [tensor.numel() for tensor in (figures, *loads, *gradients)])
    for load, total in zip(loads, summed[1:], strict=False):
        load.copy_(total.view(load.shape))
    for parameter, total in zip(with_gradient, summed[1 + len(loads) :], strict=True):
        parameter.grad = total.view(parameter.shape)
    loss, losses_B, right_B = torch.split(summed[0], [1, share.num_records, share.num_records])
    return PassTotals(
        means=[loss[0]],
        weights=[1.0],
        losses=[losses_B],
        right=[right_B],
        tokens=share.tokens,
        learned_tokens=share.learned,
    )


def _own(
    learner: Learner, share: Share, on_record: Callable[[int], None], *, in_step: bool
) -> tuple[PassTotals, str | None]:
    """The figures of the share, and how memory ran out, if it did; `in_step`: all make the same number of passes."""
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


def _figures(totals: PassTotals, share: Share, device: torch.device) -> Tensor:
    """Loss, losses and right answers of the share, each at its record's place in the batch, (1 + 2 B,)."""
    figures = torch.zeros(1 + 2 * share.num_records, device=device)
    if share.own and totals.means:
        own = torch.tensor(share.own).to(device, non_blocking=True)
        weights = torch.tensor(totals.weights).to(device, non_blocking=True)
        figures[0] = (torch.stack(totals.means) * weights).sum()
        figures[1 + own] = torch.cat(totals.losses)
        figures[1 + share.num_records + own] = torch.cat(totals.right)
    return figures
