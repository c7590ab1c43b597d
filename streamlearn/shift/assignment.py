"""The regime of an input that is classified by itself."""

from typing import NamedTuple


class Assignment(NamedTuple):
    """The likeliest regime of an input, and how well it explains the input."""

    slot: int
    """Slot of the likeliest regime."""
    p_value: float
    """Share of the regimes' own records that are explained no better, 0 to 1 (`NoveltyTest`); 1 before a regime has
    enough records to compare with."""
