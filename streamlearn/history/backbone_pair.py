"""A comparison with the untouched backbone on the same records."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackbonePair:
    """Losses of the same records, before each was trained on and under the untouched backbone."""

    records: int
    tokens: int
    """Learned tokens."""
    loss_sum: float
    """Prequential loss in nats, summed over the learned tokens."""
    backbone_loss_sum: float
    """The same tokens under the untouched backbone."""
