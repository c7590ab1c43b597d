"""What answers an input, as jobs and HTTP return it."""

from dataclasses import dataclass
from typing import Literal

from streamlearn.status.field_docs import FIELD_DOCS

AnsweredBy = Literal["regime", "adapter", "mean", "backbone"]
"""What computes the answer: the likeliest regime's experts; the adapter, where routing does not depend on regimes; the
mean of all regimes' adapters; or the untouched backbone."""


@dataclass(frozen=True, slots=True)
class Route:
    """The likeliest regime of an input, and what answers it."""

    __pydantic_config__ = FIELD_DOCS

    regime: int | None
    """Number of the likeliest regime, or of the requested one; null before the first record."""
    score: float
    """Share of the regimes' own records that are explained no better, 0 to 1 (a p-value)."""
    known: bool
    """Whether the regime explains the input: the score is at least serve.max_known_rejected."""
    answered_by: AnsweredBy
    """regime: its experts; adapter: all experts, where routing does not depend on regimes; mean: the adapters of all
    regimes, averaged; backbone: no expert."""
