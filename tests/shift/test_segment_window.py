"""A segment's window and the statistics before it."""

import numpy as np

from streamlearn.shift.change_tests import stack_phi
from streamlearn.shift.features import count_records
from streamlearn.shift.input_shift import SIZE, SegmentWindow, WindowState
from tests.shift.records import features_of, memory_of, recent


def test_records_that_leave_the_window_are_settled() -> None:
    """The window keeps the newest; every other record is in the regime's reference and in the statistics before it."""
    regimes = memory_of((0, 0), max_regimes=2)
    records = recent(features_of(0, 100), 0, start=1, regimes=regimes)
    window = SegmentWindow(WindowState())
    for each in records:
        window.append(each, regimes)
    assert window.records == records[-SIZE:]
    assert regimes[0].reference.num_records == 100 - SIZE
    assert window.tokens_before.num_records == 100 - SIZE
    expected_B = count_records(each.features.buckets for each in records[:-SIZE])
    assert np.array_equal(window.tokens_before.records_B, expected_B)
    assert window.fits_before.number == 100 - SIZE


def test_its_caches_are_functions_of_its_state() -> None:
    """A window restored from its state is the same, also after further records."""
    regimes, again = (memory_of((0, 0), max_regimes=2) for _ in range(2))
    records = recent(features_of(0, 80), 0, start=1, regimes=regimes)
    recent(features_of(0, 80), 0, start=1, regimes=again)
    window = SegmentWindow(WindowState())
    for each in records[:60]:
        window.append(each, regimes)
    restored = SegmentWindow(window.state)
    for each in records[60:]:
        window.append(each, regimes)
        restored.append(each, again)
    assert restored.records == window.records
    assert restored.fits == window.fits == [each.fit for each in window.records]
    assert np.array_equal(restored.phi_ND, window.phi_ND)
    assert np.array_equal(window.phi_ND, stack_phi(window.records))
    assert np.array_equal(restored.token_records_B, window.token_records_B)


def test_closing_settles_all_but_the_moved_records() -> None:
    """They follow the segment's other records into the reference."""
    regimes = memory_of((0, 0), max_regimes=2)
    records = recent(features_of(0, 20), 0, start=1, regimes=regimes)
    window = SegmentWindow(WindowState(records))
    window.close(records[15:], regimes)
    assert regimes[0].reference.num_records == 15
