"""What a new regime's adapter starts from: a copy of a known regime's, or nothing.

The first records of the regime are scored under the frozen backbone and under the adapters of known regimes, before
anything is learned from them. The lowest loss wins. An adapter without training equals the backbone, so a copy is only
made where it starts lower. The mean of all adapters is scored as well, for `adaptation.fallback`; a start from it, as
an adapter of the same rank, gained nothing over the best copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streamlearn.adapters.sequences import NO_REGIME, Slot
from streamlearn.learner.evaluation import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Example

MAX_CANDIDATES = 8
"""Maximum number of known regimes that are tried: those whose inputs are most like the new one's."""


@dataclass(frozen=True)
class HeadStart:
    """What the first records of a regime cost under each start."""

    backbone_loss: float
    """Under the frozen backbone, nats per learned token."""
    losses: dict[int, float]
    """Under each known regime, by slot, the likeliest first."""
    mean_loss: float | None
    """Under the mean of all adapters; None where regimes share their experts."""
    tokens: int
    """Tokens of the records."""

    @property
    def slot(self) -> int | None:
        """The regime to start from; None: from nothing."""
        lower = {slot: loss for slot, loss in self.losses.items() if loss < self.backbone_loss}  # none of them NaN
        return min(lower, key=lower.__getitem__, default=None)


def measure_head_start(
    learner: Learner,
    examples: Sequence[Example],
    known: Sequence[int],
    averaged: tuple[int, ...],
    *,
    pack_tokens: int,
) -> HeadStart:
    """Score the first records of a new regime under each start; changes nothing.

    Args:
        learner: Its routing depends on the regime.
        examples: The records, at least one.
        known: Slots of the regimes to try, the likeliest first.
        averaged: Slots of the regimes to average; empty: none.
        pack_tokens: Maximum tokens per forward pass.
    """

    def loss(slot: Slot) -> float:
        work = learner.score(examples, [slot] * len(examples), pack_tokens=pack_tokens)
        scores = run_to_end(work)
        return sum(each.loss_sum for each in scores) / sum(each.tokens for each in scores)

    return HeadStart(
        loss(NO_REGIME),
        {slot: loss(slot) for slot in known},
        loss(averaged) if averaged else None,
        sum(map(len, examples)),
    )
