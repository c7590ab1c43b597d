"""The newest records that were assigned to other regimes than the segment's."""

from collections import Counter
from collections.abc import Collection

from streamlearn.shift.recent_record import RecentRecord, stack_phi
from streamlearn.shift.regime_memory import RegimeMemory
from streamlearn.shift.segment_window import SIZE


class OtherRecords:
    """At most `SIZE` records; the oldest is settled in its regime's reference distribution when it leaves."""

    def __init__(self, records: tuple[RecentRecord, ...] = ()) -> None:
        self.records = records

    def append(self, record: RecentRecord, regimes: RegimeMemory) -> None:
        """Add the newest record."""
        self.records = (*self.records, record)
        if len(self.records) > SIZE:
            oldest, self.records = self.records[0], self.records[1:]
            following_ND = stack_phi(each for each in self.records if each.slot == oldest.slot)
            regimes.settle(oldest.slot, oldest.features, oldest.ordinal, following_ND)

    def majority_since(self, ordinal: int) -> tuple[RecentRecord, ...]:
        """The records of the most frequent regime from `ordinal` on."""
        run = [each for each in self.records if each.ordinal >= ordinal]
        [(slot, _)] = Counter(each.slot for each in run).most_common(1)
        return tuple(each for each in run if each.slot == slot)

    def remove(self, moved: Collection[RecentRecord]) -> None:
        """Drop records that were moved to the segment's window."""
        self.records = tuple(each for each in self.records if each not in moved)
