"""A batch that the monitor holds back."""

from dataclasses import dataclass, field

from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch


@dataclass
class HeldBatch:
    """A batch in the look-ahead buffer. `Monitor` corrects its slots until it is released."""

    batch: Batch | None
    """None after a restart, if the batch was released before it."""
    first: int
    """Ordinal of its first record."""
    slots: list[int]
    shifts: list[Shift] = field(default_factory=list)
    after: MonitorState | None = None
    """The monitor's state after it read this batch and before it read the next."""

    @property
    def end(self) -> int:
        """Ordinal after its last record."""
        return self.first + len(self.slots)
