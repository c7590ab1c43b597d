"""The current segment raises alarms, and is quiet while it is young or after a false alarm."""

from itertools import pairwise

from streamlearn.shift.input_shift import WindowTests

from streamlearn.settings import ShiftSettings
from streamlearn.shift.change_tests import WINDOWS, Alarm
from streamlearn.shift.detector import COOLDOWN, NO_SLOT, Segment
from streamlearn.shift.features import Features
from tests.shift.records import features_of, memory_of, recent


def alarms(segment_of: tuple[int, int], then: list[Features], settings: ShiftSettings) -> list[tuple[int, Alarm]]:
    """Alarms of a segment of (task, records) in slot 0, by the index of the record in `then`."""
    regimes = memory_of((0, 0), max_regimes=2)
    segment = Segment(settings, regimes, WindowTests.of(1e-7, WINDOWS, serial_correlation=True))
    segment.slot = 0
    raised = []
    records = recent([*features_of(*segment_of), *then], 0, start=1, regimes=regimes)
    for each in records:
        alarm = segment.add(each)
        if alarm is not None:
            raised.append((each.ordinal - segment_of[1], alarm))
            segment.cool_down()
    return raised


def test_a_false_alarm_suspends_the_tests() -> None:
    """For `COOLDOWN` records of the segment's regime."""
    raised = alarms((0, 150), features_of(1, 30), ShiftSettings())
    at = [index for index, _ in raised]
    assert at[0] <= 20
    assert {later - earlier for earlier, later in pairwise(at)} == {COOLDOWN}


def test_a_young_segment_is_not_tested() -> None:
    """Before `min_dwell_records`, and never if shifts are disabled."""
    for settings in (ShiftSettings(min_dwell_records=1000), ShiftSettings(enabled=False)):
        assert alarms((0, 150), features_of(1, 30), settings) == []


def test_absence_raises_an_alarm_with_the_other_regimes_records() -> None:
    """The segment's own records fail to appear."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=2)
    segment = Segment(ShiftSettings(), regimes, WindowTests.of(1e-7, WINDOWS, serial_correlation=True))
    segment.slot = 0
    records = recent(features_of(1, 10, seed=9), 1, start=201, regimes=regimes)
    raised = [segment.add(each) for each in records]
    alarm = next(each for each in raised if each is not None)
    assert raised[:3] == [None] * 3
    assert {each.slot for each in alarm.records} == {1}
    assert alarm.records[0].ordinal == 201


def test_a_new_segment_begins_with_its_records() -> None:
    """They are its window, in its slot; the others stay where they were."""
    regimes = memory_of((0, 50), (1, 50), max_regimes=2)
    segment = Segment(ShiftSettings(), regimes, WindowTests.of(1e-7, WINDOWS, serial_correlation=True))
    segment.slot = 0
    for each in recent(features_of(0, 20, seed=8), 0, start=101, regimes=regimes):
        segment.add(each)
    others = recent(features_of(1, 6, seed=9), 1, start=121, regimes=regimes)
    for each in others:
        segment.add(each)
    segment.restart(1, NO_SLOT, others)
    state = segment.state
    assert (state.slot, state.num_records, state.other_records) == (1, 6, ())
    assert [(each.ordinal, each.slot) for each in state.window.records] == [(121 + i, 1) for i in range(6)]
    assert regimes[0].reference.num_records == 70
