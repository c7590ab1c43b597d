"""What a baseline is built from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamlearn.daemon.model import Model
from streamlearn.settings import Settings


@dataclass(frozen=True)
class BaselineContext:
    """A loaded model, the run's settings and the stream's segments."""

    model: Model
    settings: Settings
    slots: Sequence[int]
    """The regime slot of each segment; segments of the same tasks share one."""
    records: int
    """Training records of all passes together."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The arm's changes in the section `baseline`: keyword arguments of the baseline, by name."""

    @property
    def holdout_records(self) -> int:
        """Number of records that the daemon would keep as hold-out: the budget of every replay memory."""
        return self.settings.holdout.records_per_regime * len(set(self.slots))
