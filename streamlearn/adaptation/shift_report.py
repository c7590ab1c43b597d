"""What the daemon did about a shift."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamlearn.shift.shift import Shift
from streamlearn.status.status import ShiftStatus


@dataclass(frozen=True)
class ShiftReport:
    """A shift that was acted on, and what its probe cost and found."""

    shift: Shift
    step: int
    """Steps taken before it."""
    probe_tokens: int = 0
    probe_seconds: float = 0.0
    mean_similarity: float | None = None
    """Mean CKA over all banks, heads and experts; None when experts were not compared."""
    started_from: int | None = None
    """Number of the regime whose adapter was copied; None: the regime starts from nothing, or has no adapter."""
    refused_return: int | None = None
    """Number of the known regime that the inputs look like, whose losses say otherwise; None: there is none."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {**self.__dict__, "shift": self.shift.to_json()}

    @property
    def status(self) -> ShiftStatus:
        """The shift as it is published."""
        own = {name: value for name, value in self.__dict__.items() if name != "shift"}
        fields = {name: value for name, value in self.shift.to_json().items() if name != "slot"}
        return ShiftStatus(**fields, **own)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ShiftReport":
        """The inverse of `to_json`."""
        return cls(**{**fields, "shift": Shift.from_json(fields["shift"])})
