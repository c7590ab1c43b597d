"""The test of single tokens. `tests/contracts/test_detectors.py` holds it to its level and its delay."""

import numpy as np
import pytest
from scipy.stats import betabinom

from streamlearn.shift.change_tests import MIN_BEFORE, TokenChange, TokenPresenceTest
from streamlearn.shift.features import NUM_BUCKETS, DocumentFrequency

TEST = TokenPresenceTest(level=1e-7)


def counts(bucket: int, number: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    counts_B = np.zeros(NUM_BUCKETS, dtype=np.float32)
    counts_B[bucket] = number
    return counts_B


def test_the_statistic_is_equation_1() -> None:
    """The beta-binomial probability of the token's count in the window."""
    change = TEST.test(counts(7, 30), 32, DocumentFrequency(counts(7, 2), 100.0))
    assert change is not None
    assert (change.bucket, change.appeared) == (7, True)
    assert change.statistic == pytest.approx(-betabinom.logpmf(30, 32, 2.5, 98.5))
    assert change.statistic > change.threshold


def test_needs_a_full_window_and_enough_records_before_it() -> None:
    """Otherwise nothing is tested."""
    assert TEST.test(counts(7, 30), 31, DocumentFrequency(counts(7, 0), 100.0)) is None
    assert TEST.test(counts(7, 30), 32, DocumentFrequency(counts(7, 0), MIN_BEFORE - 1.0)) is None


def test_only_changes_between_rare_and_common_count() -> None:
    """A token in a quarter of the records before is not rare, however common it is now."""
    assert TEST.test(counts(7, 32), 32, DocumentFrequency(counts(7, 250), 1000.0)) is None
    disappeared = TEST.test(counts(7, 0), 32, DocumentFrequency(counts(7, 950), 1000.0))
    assert disappeared is not None
    assert not disappeared.appeared


@pytest.mark.parametrize("appeared", [True, False])
def test_the_change_point_is_where_the_token_changes(appeared: bool) -> None:
    """Single records that disagree do not move it."""
    has_token = [not appeared] * 12 + [appeared] * 20
    has_token[20] = not appeared
    records = [np.array([1, 7 if has else 2], dtype=np.uint16) for has in has_token]
    assert TEST.change_point(records, TokenChange(7, appeared, 30.0, 20.0)) == 12
