"""What a snapshot keeps of `Monitor`."""

from dataclasses import dataclass, field

from streamlearn.shift.detector_state import DetectorState


@dataclass(frozen=True, eq=False)
class MonitorState:
    """The monitor after it read one batch, decided what it could, and before it read the next."""

    detector: DetectorState = field(default_factory=DetectorState)
    undecided: tuple[tuple[int, ...], ...] = ()
    """Slots of each batch that was undecided then. Older releases also list those that the batch just read decided."""
