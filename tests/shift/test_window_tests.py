"""Each of the three tests detects a change that the tests before it miss."""

from collections.abc import Sequence

import pytest

from streamlearn.shift.change_tests import WINDOWS, Alarm
from streamlearn.shift.features import Features, Featurizer, input_of
from streamlearn.shift.input_shift import SegmentWindow, WindowState, WindowTests
from tests.shift.records import features_of, memory_of, recent
from tests.shift.streams import questions

TESTS = WindowTests.of(1e-7, WINDOWS, serial_correlation=True)


def first_alarm(records: Sequence[Features]) -> Alarm | None:
    """Append records to the window of one segment until a test raises an alarm."""
    regimes = memory_of((0, 0), max_regimes=2)
    window = SegmentWindow(WindowState())
    for each in recent(list(records), 0, start=1, regimes=regimes):
        window.append(each, regimes)
        if each.ordinal > 64 and (alarm := TESTS.test(window, regimes[0].reference)):
            return alarm
    return None


def test_a_stationary_segment_raises_no_alarm() -> None:
    """In 400 records."""
    assert first_alarm(features_of(0, 400)) is None


def test_another_task_raises_an_alarm_with_its_records() -> None:
    """From the change point on, and without a token change."""
    alarm = first_alarm([*features_of(0, 150), *features_of(1, 50)])
    assert alarm is not None
    assert alarm.token_change is None
    assert alarm.statistic > alarm.threshold
    assert abs(alarm.records[0].ordinal - 151) <= 1


@pytest.mark.parametrize("appeared", [True, False])
def test_one_token_raises_an_alarm_of_its_own(appeared: bool) -> None:
    """Whether it appears or disappears."""
    featurizer = Featurizer(0)
    examples = questions([appeared] * 150 + [not appeared] * 50)
    alarm = first_alarm([featurizer.featurize(input_of(each)) for each in examples])
    assert alarm is not None
    assert alarm.token_change is not None
    assert (alarm.token_change.bucket, alarm.token_change.appeared) == (7, appeared)
    assert abs(alarm.records[0].ordinal - 151) <= 3
