"""Scores of records by several processes: each makes one forward pass of a round.

The figures are those of the leader alone, bit for bit where the processes compute alike: each pass has the records that
it would have there.
"""
# Shape suffixes: B records of the round.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from streamlearn.adapters.sequences import Slot
from streamlearn.distributed.channel import Channel
from streamlearn.distributed.dummy_pass import dummy_pass, out_of_step
from streamlearn.learner.evaluation import ExampleScore, run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.learner.oom_retry import is_out_of_memory
from streamlearn.stream.decode import Example


@dataclass(frozen=True)
class ScorePass:
    """What one process computes of a round."""

    own: Sequence[int]
    """Indices of its records; empty: it has none."""
    examples: Sequence[Example]
    """These records."""
    slots: Sequence[Slot] | None
    """What adapts each."""
    num_records: int
    """Records of the round."""


def compute(channel: Channel, learner: Learner, own: ScorePass) -> list[tuple[float, int]]:
    """Make one pass and join the figures of all.

    Returns:
        Summed loss and correct tokens of each record of the round; of use in the leader only.

    Raises:
        torch.OutOfMemoryError: a process ran out of memory, this one or another.
    """
    scores, fault = _own(channel, learner, own)
    faults = channel.exchange(np.array([fault is not None]))[:, 0]
    if faults.any():
        ranks = ", ".join(map(str, np.flatnonzero(faults)))
        raise torch.OutOfMemoryError(f"rank {ranks} ran out of memory{': ' if fault else ''}{fault or ''}")
    figures_B2 = torch.zeros(own.num_records, 2, dtype=torch.float64)
    for index, each in zip(own.own, scores, strict=True):
        figures_B2[index] = torch.tensor([each.loss_sum, each.correct])
    channel.add_up(figures_B2)
    return [(loss_sum, int(correct)) for loss_sum, correct in figures_B2.tolist()]


def _own(channel: Channel, learner: Learner, own: ScorePass) -> tuple[list[ExampleScore], str | None]:
    """The scores of the records, and how memory ran out, if it did."""
    if not own.own:
        if channel.mesh is not None:
            dummy_pass(learner, with_gradient=False)
        return [], None
    tokens = sum(map(len, own.examples))
    try:
        work = score(learner.model, own.examples, learner.device, pack_tokens=tokens, slots=own.slots)
        return run_to_end(work), None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if channel.mesh is not None:
            raise out_of_step(error) from error
        return [], " ".join(str(error).split())[:160]
