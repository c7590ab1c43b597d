"""The untouched backbone beside the model, on a sample of the records that are trained on.

The model's loss of a record before it is trained on is known. The backbone's costs a forward pass, so it is measured
for a sample: of each batch one record waits, and when the time budget allows, the newest that wait are measured.
"""

from collections import deque

from streamlearn.adaptation.time_budget import TimeBudget
from streamlearn.adapters.routing_context import NO_REGIME
from streamlearn.history.backbone_pair import BackbonePair
from streamlearn.learner.evaluation import run_to_end, score
from streamlearn.learner.learner import Learner, Step
from streamlearn.settings import HoldoutSettings
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example

MAX_WAITING = 2
"""Records of one measurement; when more wait, the oldest are left out."""
TIME_SHARE = 0.5
"""Share of `holdout.time_share` that may be spent, beside what scoring spends."""


class BackboneComparison:
    """Measuring changes nothing that training depends on. Only the thread that owns the model calls it."""

    def __init__(self, learner: Learner, settings: HoldoutSettings, *, pack_tokens: int) -> None:
        """`pack_tokens` is the maximum number of tokens of a forward pass."""
        self.budget = TimeBudget(TIME_SHARE * settings.time_share)
        self._learner = learner
        self._pack_tokens = pack_tokens
        self._waiting: deque[tuple[Example, float]] = deque(maxlen=MAX_WAITING)

    def add(self, batch: Batch, step: Step) -> None:
        """Let one record of a batch wait, which `step` was made from: a different one in each step."""
        self.budget.trained(step.seconds)
        if step.refusal is None:
            index = step.number % len(batch.examples)
            self._waiting.append((batch.examples[index], step.record_losses[index]))

    def clear(self) -> None:
        """Forget the waiting records."""
        self._waiting.clear()

    def measure(self, *, idle: bool) -> BackbonePair | None:
        """Measure the waiting records if the time budget allows; None if not, or without any."""
        if not self._waiting or not (idle or self.budget.affordable):
            return None
        examples, losses = zip(*self._waiting, strict=True)
        self._waiting.clear()
        with self.budget.spending(idle=idle):
            learner, slots = self._learner, [NO_REGIME] * len(examples)
            scores = run_to_end(
                score(learner.model, examples, learner.device, pack_tokens=self._pack_tokens, slots=slots)
            )
        return BackbonePair(
            records=len(scores),
            tokens=sum(each.tokens for each in scores),
            loss_sum=sum(loss * each.tokens for loss, each in zip(losses, scores, strict=True)),
            backbone_loss_sum=sum(each.loss_sum for each in scores),
        )
