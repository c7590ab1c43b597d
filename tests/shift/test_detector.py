"""Segments, and the detector's decisions on single records. `test_monitor.py` tests them on streams."""

from dataclasses import replace

import numpy as np
import pytest

from streamlearn.codec import from_arrays, to_arrays
from streamlearn.settings import ShiftSettings
from streamlearn.shift.change_tests import OTHER_TESTS, SIZE, WINDOW_TESTS, Alarm, Window
from streamlearn.shift.detector import (
    COOLDOWN,
    WHITENED_EVERY,
    AssignedRecord,
    DetectorState,
    InputShiftDetector,
    Segment,
)
from streamlearn.shift.features import Features
from streamlearn.shift.reference import IDENTITY, Reference
from tests.shift.records import features_of, memory_of, recent
from tests.shift.sample_features import smollm2_features


def run(detector: InputShiftDetector, records: list[Features]) -> list[AssignedRecord]:
    return [detector.update(each, ()) for each in records]


def test_a_shift_reassigns_the_records_since_its_onset() -> None:
    """Their ordinals are the newest ones, and the record that declares it has the new slot itself."""
    assigned = run(InputShiftDetector(ShiftSettings()), [*features_of(0, 100), *features_of(1, 40)])
    declared = next(each for each in assigned[1:] if each.shifts)
    [shift] = declared.shifts
    at = assigned.index(declared) + 1
    assert shift.declared_at == at
    assert declared.reassigned == tuple((ordinal, 1) for ordinal in range(shift.onset, at + 1))
    assert declared.slot == 1
    assert assigned[-1] == AssignedRecord(1)


def test_a_burst_of_similar_records_is_no_shift() -> None:
    """Sixty-four repetitions of one record of the regime: the change test alarms, the classifier does not."""
    records = features_of(0, 200)
    assigned = run(InputShiftDetector(ShiftSettings()), [*records, *[records[0]] * 64])
    assert [shift.number for each in assigned for shift in each.shifts] == [1]


def test_the_bundled_sample_has_two_boundaries_in_the_tokens_of_smollm2() -> None:
    """Its tokenizer divides words otherwise than nano's does, and passages repeat: other thresholds decide."""
    assigned = run(InputShiftDetector(ShiftSettings()), smollm2_features())
    shifts = [shift for each in assigned for shift in each.shifts]
    assert [(shift.number, shift.onset, shift.known) for shift in shifts] == [
        (1, 1, False),
        (2, 201, False),
        (3, 343, False),
    ]


@pytest.mark.parametrize("at", [20, 32])
def test_a_change_before_the_dwell_ends_is_a_shift_and_no_split(at: int) -> None:
    """The change tests wait for `min_dwell_records`; the newest run of a mixture is a change all the same."""
    assigned = run(InputShiftDetector(ShiftSettings()), [*features_of(0, at), *features_of(1, 40)])
    [change] = [shift for each in assigned[1:] for shift in each.shifts]
    assert (change.onset, change.parent, change.known) == (at + 1, None, False)
    assert change.declared_at < ShiftSettings().min_dwell_records
    assert assigned[-1].slot == change.slot


def test_the_false_alarm_budget_is_divided_by_the_number_of_tests() -> None:
    """A test that is added raises the threshold of the others."""
    seen: list[float] = []

    def recorded(window: Window, reference: Reference, level: float) -> None:
        seen.append(level)

    for tests in (WINDOW_TESTS, (*WINDOW_TESTS, *WINDOW_TESTS)):
        run(InputShiftDetector(ShiftSettings(), tests=[*tests, recorded]), features_of(0, 70))
        expected = ShiftSettings().false_alarms_per_million * 1e-6 / (len(tests) + 1 + len(OTHER_TESTS))
        assert seen[-1] == pytest.approx(expected)


def test_without_a_free_slot_there_is_no_shift() -> None:
    """The segment goes on until a slot is no longer protected."""
    records = [*features_of(0, 100), *features_of(1, 100), *features_of(2, 60)]
    detector = InputShiftDetector(ShiftSettings(max_regimes=2))
    assigned = [detector.update(each, {0, 1} if i < 230 else ()) for i, each in enumerate(records)]
    late = [shift for each in assigned for shift in each.shifts][2]
    assert late.declared_at >= 231
    assert late.dropped == 1


def ordinals_tested(settings: ShiftSettings) -> list[int]:
    """Ordinals of the records at which a test runs that always raises an alarm."""
    tested: list[int] = []

    def alarmed(window: Window, reference: Reference, level: float) -> Alarm:
        tested.append(window.records[-1].ordinal)
        return Alarm(9.0, 5.0, window.records[-8:])

    run(InputShiftDetector(settings, tests=[alarmed]), features_of(0, 120))
    return tested


def test_a_false_alarm_suspends_the_tests() -> None:
    """For `COOLDOWN` records of the segment's regime."""
    assert ordinals_tested(ShiftSettings()) == list(range(ShiftSettings().min_dwell_records, 121, COOLDOWN))


def test_records_that_leave_the_window_are_committed() -> None:
    """The window keeps the newest; every other record is in the regime's reference and in the statistics before it."""
    regimes = memory_of((0, 0), max_regimes=2)
    records = recent(features_of(0, 100), 0, start=1, regimes=regimes)
    segment = Segment(slot=0)
    for record in records:
        segment = segment.after(record, regimes)
    assert segment.window.records == records[-SIZE:]
    assert regimes[0].reference.num_records == 100 - SIZE
    assert segment.window.tokens_before.num_records == 100 - SIZE
    before = Window(records[:-SIZE])
    assert np.array_equal(segment.window.tokens_before.records_B, before.token_records_B)
    assert segment.window.fits_before.number == 100 - SIZE


def test_the_metric_is_part_of_the_state() -> None:
    """Restored between two whitenings, a detector declares the shifts of the original, with their statistics."""
    records = [*features_of(0, 100), *features_of(1, 60)]
    whole = InputShiftDetector(ShiftSettings())
    expected = run(whole, records)
    assert WHITENED_EVERY < 100
    for cut in (WHITENED_EVERY - 1, WHITENED_EVERY, 100, 2 * WHITENED_EVERY - 1):
        first, second = (InputShiftDetector(ShiftSettings()) for _ in range(2))
        run(first, records[:cut])
        second.load(from_arrays(DetectorState, to_arrays(first.state)))
        assert run(second, records[cut:]) == expected[cut:]
        assert np.array_equal(second.state.metric, whole.state.metric)
    unwhitened = InputShiftDetector(ShiftSettings())
    run(unwhitened, records[:100])
    unwhitened.load(replace(unwhitened.state, metric=IDENTITY))
    assert run(unwhitened, records[100:]) != expected[100:]
