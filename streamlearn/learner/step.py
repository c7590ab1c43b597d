"""What is known of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Figures of one step."""

    number: int
    """Counted from 1; refused steps are counted too."""
    loss: float
    """Prequential loss: mean over the learned tokens of the batch before the update, nats per token."""
    record_losses: tuple[float, ...]
    """The same for each record, in batch order."""
    tokens: int
    """All tokens of the batch."""
    learned_tokens: int
    """Tokens that contribute to the loss."""
    grad_norm: float
    """Global norm of the gradient before clipping; NaN if the loss was not finite."""
    seconds: float
    refusal: str | None = None
    """Why there was no update; None if there was one."""
    record_correct: tuple[bool, ...] = ()
    """Whether every learned token of each record was the most probable one, under the weights before the update."""
