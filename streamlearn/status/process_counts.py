"""What one process did, whatever it took back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """Counts that begin at zero with the process and never fall.

    What is done again after a rollback counts again. The run's totals, which a snapshot keeps, are in `Status`.
    """

    steps: int = 0
    records_trained: int = 0
    records_held_out: int = 0
    tokens_trained: int = 0
    update_refusals: int = 0
    dead_letters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """By reason."""
    shifts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """By kind."""
