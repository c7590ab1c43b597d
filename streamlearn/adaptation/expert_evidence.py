"""What the daemon knows about the experts beside their weights."""
# Shape suffixes: H heads, K experts a head, N regime slots.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from streamlearn.stream.decode import Example


@dataclass(frozen=True)
class ExpertEvidence:
    """What is known beside the learner; tensors by bank."""

    numbers: Mapping[int, int]
    """Slot of each remembered regime -> its number."""
    load: Mapping[str, Tensor]
    """Tokens that each expert was trained on, (H, K)."""
    similarity: Mapping[str, Tensor]
    """CKA that each slot's probe found, (H, K, N)."""
    holdouts: Mapping[int, Sequence[Example]]
    """By slot."""
