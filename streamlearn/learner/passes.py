"""The forward and backward passes of a step: their totals, and what may compute them elsewhere."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from streamlearn.adapters.sequences import Slot
from streamlearn.learner.evaluation import ExampleScore
from streamlearn.learner.loss import PackedLoss
from streamlearn.learner.packing import PackedBatch
from streamlearn.stream.decode import Example


@dataclass
class PassTotals:
    """What the forward passes of a step computed. It stays on the device until `read`, which alone waits for it."""

    means: list[Tensor] = field(default_factory=list)
    """Mean loss of each pass over its learned tokens, scalars."""
    weights: list[float] = field(default_factory=list)
    """Weight of each in the loss of the batch."""
    losses: list[Tensor] = field(default_factory=list)
    """Mean loss of each record of a pass."""
    right: list[Tensor] = field(default_factory=list)
    """Whether each record's learned tokens were all the most probable ones, as 0.0 or 1.0."""
    tokens: int = 0
    learned_tokens: int = 0

    def add(self, packed: PackedBatch, loss: PackedLoss, weight: float) -> None:
        """Add the pass over one part, whose loss has this weight in the loss of the batch."""
        sums_B, correct_B = loss.per_record(packed)
        self.means.append(loss.mean.detach())
        self.weights.append(weight)
        self.losses.append(sums_B / packed.learned_B)
        self.right.append((correct_B == packed.learned_B).float())
        self.tokens += packed.input_ids.shape[1]
        self.learned_tokens += len(packed.target_L)

    def read(self, norm: Tensor) -> tuple[float, float, list[float], list[bool]]:
        """Return the batch's loss, the norm, and each record's loss and whether all of it was right."""
        figures = torch.cat([torch.stack(self.means), norm[None], *self.losses, *self.right]).tolist()
        passes, records = len(self.means), sum(map(len, self.losses))
        means, losses, right = figures[:passes], figures[passes + 1 : -records], figures[-records:]
        loss = sum(weight * mean for weight, mean in zip(self.weights, means, strict=True))
        return loss, figures[passes], losses, [each == 1.0 for each in right]


class Scorer(Protocol):
    """See `Learner.score_here`."""

    def __call__(
        self, examples: Sequence[Example], slots: Sequence[Slot] | None, *, pack_tokens: int
    ) -> Generator[None, None, list[ExampleScore]]:
        """Compute loss and accuracy of each example; yields after every forward pass, or several at a time."""


class Passes(Protocol):
    """See `Learner.gradients`."""

    def __call__(
        self, examples: Sequence[Example], slots: Sequence[int] | None, parts: int, on_record: Callable[[int], None], /
    ) -> PassTotals:
        """Leave the gradients of a batch with the parameters."""
