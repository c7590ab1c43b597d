"""What a snapshot keeps of `InputShiftDetector`."""

from dataclasses import dataclass, field

from streamlearn.shift.refused import RefusedRecord, RefusedReturn
from streamlearn.shift.regime_memory import SavedProfiles
from streamlearn.shift.segment import SegmentState


@dataclass(frozen=True, eq=False)
class DetectorState:
    """Everything that later decisions depend on. Nothing in it is written to; profiles are shared while unchanged."""

    ordinal: int = 0
    """Records received."""
    num_shifts: int = 0
    segment: SegmentState = field(default_factory=SegmentState)
    regimes: SavedProfiles = ()
    next_number: int = 1
    """Number of the next new regime."""
    refused: tuple[RefusedReturn, ...] = ()
    """Returns that are still to be declared, and then are not returns."""
    refused_records: tuple[RefusedRecord, ...] = ()
    """Records that are still to be read, and then are not of the regime that they look like."""

    @property
    def numbers(self) -> dict[int, int]:
        """Number of each regime, by slot."""
        return {slot: profile.number for slot, profile in enumerate(self.regimes) if profile is not None}
