"""Whether records whose inputs look like a known regime's are its: their losses, beside the regime's own.

The records are scored under the regime's adapter before anything is learned from them. Its own losses are those of its
last records, each measured before it was trained on, so both are of records that the adapter has not seen. A return is
refused where the records' losses are higher by the one-sided rank test of Mann and Whitney (1947). The test asks for no
form of the distribution: losses of labels and of texts have none in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import mannwhitneyu

from streamlearn.learner.evaluation import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Example


@dataclass(frozen=True)
class ReturnCheck:
    """What the first records of a supposed return cost under the regime's adapter."""

    losses: tuple[float, ...]
    """Of each record, nats per learned token."""
    own_losses: tuple[float, ...]
    """Of the regime's last records."""

    @property
    def p_value(self) -> float:
        """Probability of losses at least as high, if the records are the regime's; 1 where none can be compared.

        >>> ReturnCheck((3.0, 4.0, 5.0), (0.5, 0.6, 0.7, 0.8)).p_value < 0.05 < ReturnCheck((0.6,), (0.5, 0.7)).p_value
        True
        """
        if not (self.losses and self.own_losses):
            return 1.0
        return float(mannwhitneyu(self.losses, self.own_losses, alternative="greater").pvalue)


def check_return(
    learner: Learner, examples: Sequence[Example], slot: int, own_losses: Sequence[float], *, pack_tokens: int
) -> ReturnCheck:
    """Score the first records of a supposed return under the adapter of the regime in `slot`; changes nothing.

    Args:
        learner: Each regime has an adapter of its own.
        examples: The records, at least one.
        slot: Slot of the regime.
        own_losses: Losses of the regime's last records, nats per learned token.
        pack_tokens: Maximum tokens per forward pass.
    """
    work = learner.score(examples, [slot] * len(examples), pack_tokens=pack_tokens)
    losses = tuple(each.loss_sum / each.tokens for each in run_to_end(work))
    return ReturnCheck(losses, tuple(own_losses))
