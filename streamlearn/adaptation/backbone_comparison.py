"""The untouched backbone beside the model, on a sample of the records that are trained on.

The model's loss of a record before it is trained on is known. The backbone's costs a forward pass, so it is measured
for a sample: of each batch one record waits, and when the time budget allows, the newest that waits is measured.
"""

from typing import NamedTuple

from streamlearn.adaptation.time_budget import TimeBudget
from streamlearn.adapters.sequences import NO_REGIME
from streamlearn.history.backbone_pair import BackbonePair
from streamlearn.learner.evaluation import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.learner.step import Step
from streamlearn.settings import HoldoutSettings
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example


class WaitingRecord(NamedTuple):
    """A record that was trained on."""

    example: Example
    loss: float
    """Before it was trained on, nats per learned token."""


class BackboneComparison:
    """Measuring changes nothing that training depends on. Only the thread that owns the model calls it."""

    def __init__(self, learner: Learner, settings: HoldoutSettings) -> None:
        self.budget = TimeBudget(settings.time_share / 2)
        """The other half is for scoring hold-out records."""
        self._learner = learner
        self._waiting: WaitingRecord | None = None

    def add(self, batch: Batch, step: Step) -> None:
        """Let one record of a batch wait, which `step` was made from: not always the same one of its batch."""
        self.budget.trained(step.seconds)
        if step.refusal is None:
            index = step.number % len(batch.examples)
            self._waiting = WaitingRecord(batch.examples[index], step.record_losses[index])

    def clear(self) -> None:
        """Forget the record that waits."""
        self._waiting = None

    def measure(self, *, idle: bool) -> BackbonePair | None:
        """Measure the record that waits, if there is one and the time budget allows; `idle`: no other record does."""
        if self._waiting is None or not (idle or self.budget.affordable):
            return None
        (example, loss), self._waiting = self._waiting, None
        learner = self._learner
        work = score(learner.model, [example], learner.device, pack_tokens=len(example), slots=[NO_REGIME])
        with self.budget.spending(idle=idle):
            [found] = run_to_end(work)
        return BackbonePair(1, found.tokens, loss * found.tokens, found.loss_sum)
