"""The result of routing."""

from typing import NamedTuple

from streamlearn.publish.publication import PublishedRegime


class RoutedPrompt(NamedTuple):
    """What a prompt was taken for."""

    regime: PublishedRegime | None
    """The regime that explains it; None if none does."""
    score: float
    """Share of the likeliest regime's own records that are explained no better, 0 to 1."""
