"""A test that exceeded its threshold, and the records that may belong to another regime."""

from dataclasses import dataclass

from streamlearn.shift.recent_record import RecentRecord
from streamlearn.shift.token_presence_test import TokenChange


@dataclass(frozen=True)
class Alarm:
    """Grounds for a shift. `SegmentClassifier` decides what the records are."""

    statistic: float
    threshold: float
    records: tuple[RecentRecord, ...]
    """The records from the estimated change point on."""
    token_change: TokenChange | None = None
    """The token that appeared or disappeared. The records left the segment's regime then, however well they fit it."""
