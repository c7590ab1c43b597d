"""The CUSUM over which records are the segment's own."""

import doctest
import math

import numpy as np
import pytest

from streamlearn.shift import change_tests as absence_test
from streamlearn.shift.change_tests import AbsenceState, AbsenceTest


def test_follows_its_equations() -> None:
    """Eq. (1) and (2), spelled out; the run starts where the statistic leaves 0."""
    test, c, share, start = AbsenceTest(level=1e-7), 0.0, 0.0, 0
    for ordinal, own in enumerate(np.random.default_rng(0).random(200) < 0.4, start=1):
        p = min(max(share, 0.03), 0.95)
        if own:
            c = max(0.0, c + math.log(0.03 / (1 - p)))
        else:
            start = ordinal if c == 0.0 else start
            c += math.log(0.97 / p)
        share += ((not own) - share) / 32
        test.update(ordinal, own=bool(own))
        assert test.state.run_start == start
        assert (test.state.statistic, test.state.share) == pytest.approx((c, share))


@pytest.mark.parametrize("others", [0.0, 0.3, 0.6])
def test_interleaved_regimes_are_no_absence(others: float) -> None:
    """A constant share of other regimes' records raises no alarm in 5,000 records."""
    test = AbsenceTest(level=1e-7)
    for ordinal, own in enumerate(np.random.default_rng(1).random(5000) >= others, start=1):
        test.update(ordinal, own=bool(own))
        assert not test.drift_detected


def test_a_new_segment_starts_with_the_share_of_its_own_records() -> None:
    """Of the newest 32 records, 8 are its own; the start of the last run stays on disk."""
    test = AbsenceTest(level=1e-7, state=AbsenceState(0.1, 12.0, 70))
    test.restart([60, *range(93, 101)], 100)
    assert test.state == AbsenceState(1 - 8 / 32, 0.0, 70)


def test_the_docstring_finds_a_planted_absence() -> None:
    """At the ordinal that it states."""
    result = doctest.testmod(absence_test)
    assert result.attempted > 0
    assert result.failed == 0
