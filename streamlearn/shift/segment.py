"""The current segment: the part of the stream since the last shift, and the tests for its end.

Records of the segment's regime enter its window, which is compared with the segment before it. Records of other regimes
are counted by the absence test. Either test may raise an alarm.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from streamlearn.settings import ShiftSettings
from streamlearn.shift.absence_test import AbsenceState, AbsenceTest
from streamlearn.shift.alarm import Alarm
from streamlearn.shift.other_records import OtherRecords
from streamlearn.shift.recent_record import RecentRecord
from streamlearn.shift.regime_memory import RegimeMemory
from streamlearn.shift.segment_window import SegmentWindow, WindowState
from streamlearn.shift.window_tests import WindowTests

NO_SLOT = -1
COOLDOWN = 4
"""Records of the segment's regime after a false alarm before its window is tested again."""


@dataclass(frozen=True, eq=False)
class SegmentState:
    """What a snapshot keeps of the segment."""

    slot: int = NO_SLOT
    """Slot of its regime; `NO_SLOT` before the first record, and after its regime was forgotten."""
    parent: int = NO_SLOT
    """Slot of the regime from which its regime was split, if the segment is the regime's first; else `NO_SLOT`."""
    num_records: int = 0
    """Records of its regime since it began."""
    cooldown: int = 0
    window: WindowState = field(default_factory=WindowState)
    other_records: tuple[RecentRecord, ...] = ()
    absence: AbsenceState = field(default_factory=AbsenceState)
    forgotten: int = 0
    """Number of its regime if that was forgotten, and no record has come since; else 0."""


class Segment:
    """The segment's counters, its window, the records of other regimes, and the tests."""

    def __init__(self, settings: ShiftSettings, regimes: RegimeMemory, tests: WindowTests) -> None:
        self._settings = settings
        self._regimes = regimes
        self._tests = tests
        self._absence = AbsenceTest(tests.level)
        self.load(SegmentState())

    @property
    def state(self) -> SegmentState:
        """The state; cheap, since nothing is copied."""
        return SegmentState(
            slot=self.slot,
            parent=self.parent,
            num_records=self._num_records,
            cooldown=self._cooldown,
            window=self._window.state,
            other_records=self._others.records,
            absence=self._absence.state,
            forgotten=self.forgotten,
        )

    def load(self, state: SegmentState) -> None:
        """Continue from a saved state."""
        self.slot, self.parent = state.slot, state.parent
        self._num_records, self._cooldown = state.num_records, state.cooldown
        self._window = SegmentWindow(state.window)
        self._others = OtherRecords(state.other_records)
        self._absence.state = state.absence
        self.forgotten = state.forgotten

    @property
    def recent_records(self) -> tuple[RecentRecord, ...]:
        """The records that may still be moved to another regime, in stream order."""
        return tuple(sorted((*self._window.records, *self._others.records), key=lambda each: each.ordinal))

    @property
    def other_slots(self) -> set[int]:
        """Slots of the other regimes that recent records belong to."""
        return {each.slot for each in self._others.records}

    def add(self, record: RecentRecord) -> Alarm | None:
        """Add the next record of the stream, and test for the end of the segment."""
        is_own = record.slot == self.slot
        self._absence.update(record.ordinal, own=is_own)
        return self._add_own(record) if is_own else self._add_other(record)

    def cool_down(self) -> None:
        """Suspend the window's tests after a false alarm."""
        self._cooldown = COOLDOWN

    def begin(self, record: RecentRecord) -> None:
        """Begin a segment with a record that comes after none, or after the segment's regime was forgotten."""
        self.slot, self.forgotten = record.slot, 0
        self.add(record)

    def forget(self, slot: int) -> None:
        """Forget the records of the regime in a slot. Where it is the segment's, the next record begins a segment."""
        self._others = OtherRecords(tuple(each for each in self._others.records if each.slot != slot))
        if self.parent == slot:
            self.parent = NO_SLOT
        if self.slot == slot:
            number, others = self._regimes[slot].number, self._others.records
            self.load(SegmentState(other_records=others, forgotten=number))

    def restart(self, slot: int, parent: int, records: Collection[RecentRecord]) -> None:
        """Begin a new segment with some of the recent records, which are its window."""
        newest = self.recent_records[-1].ordinal
        self._window.close(records, self._regimes)
        self._regimes.calibrate()
        self._others.remove(records)
        self._absence.restart([each.ordinal for each in records], newest)
        self.slot, self.parent = slot, parent
        self._num_records, self._cooldown = len(records), 0
        self._window = SegmentWindow(WindowState(tuple(replace(each, slot=slot) for each in records)))

    def split(self, moved: Collection[RecentRecord], new: int) -> None:
        """Move recent records to the regime in `new`, which occurs in between those of their own. The segment goes on.

        Its statistics held the records of both regimes, so they begin anew.
        """
        newest = self.recent_records[-1].ordinal
        staying = tuple(each for each in self._window.records if each not in moved)
        kept = [each for each in self._others.records if each not in moved]
        others = sorted([*kept, *(replace(each, slot=new) for each in moved)], key=lambda each: each.ordinal)
        if len(staying) < len(self._window.records):
            self._num_records, self._cooldown, self.parent = len(staying), 0, NO_SLOT
            self._window = SegmentWindow(WindowState(staying))
            self._absence.restart([each.ordinal for each in staying], newest)
        self._others = OtherRecords()
        for each in others:
            self._others.append(each, self._regimes)

    def _add_own(self, record: RecentRecord) -> Alarm | None:
        self._window.append(record, self._regimes)
        self._num_records += 1
        self._cooldown = max(self._cooldown - 1, 0)
        if not self._settings.enabled or self._cooldown or self._num_records < self._settings.min_dwell_records:
            return None
        return self._tests.test(self._window, self._regimes[self.slot].reference)

    def _add_other(self, record: RecentRecord) -> Alarm | None:
        self._others.append(record, self._regimes)
        if not self._absence.drift_detected:
            return None
        absence = self._absence.state
        return Alarm(absence.statistic, self._absence.threshold, self._others.majority_since(absence.run_start))
