"""Document frequency counts records, not occurrences."""

import numpy as np
import pytest

from streamlearn.shift.features import HALVED_AT, DocumentFrequency, count_records

ONE, OTHER = np.array([5, 5, 7], dtype=np.uint16), np.array([7], dtype=np.uint16)


def test_counts_each_token_once_per_record() -> None:
    """Removing a record is the inverse of adding it, and merging adds both counts."""
    both = DocumentFrequency().after(ONE).after(OTHER)
    assert (both.records_B[[5, 7]].tolist(), both.num_records) == ([1.0, 2.0], 2.0)
    assert both.expected[[5, 7, 8]].tolist() == pytest.approx([0.5, 2.5 / 3, 0.5 / 3])
    back = both.without(ONE)
    assert (back.records_B[[5, 7]].tolist(), back.num_records) == ([0.0, 1.0], 1.0)
    merged = both.merged(back)
    assert (merged.records_B[[5, 7]].tolist(), merged.num_records) == ([1.0, 3.0], 3.0)
    assert count_records([ONE, OTHER])[[5, 7]].tolist() == [1.0, 2.0]


def test_old_records_fade() -> None:
    """At the bound all counts are halved, so a share stays what it was."""
    full = DocumentFrequency(np.full(4096, HALVED_AT, dtype=np.float32), HALVED_AT)
    after = full.after(ONE)
    assert after.num_records == HALVED_AT / 2 + 1
    assert after.records_B[[5, 8]].tolist() == [HALVED_AT / 2 + 1, HALVED_AT / 2]


def test_a_share_stays_between_0_and_1() -> None:
    """A record that was counted before the counts were halved takes a whole one off."""
    records_B = np.full(4096, HALVED_AT, dtype=np.float32)
    records_B[5] = 1.0
    halved = DocumentFrequency(records_B, HALVED_AT).after(OTHER)
    without = halved.without(ONE)
    assert without.expected.min() > 0.0
    assert without.expected.max() < 1.0
    assert without.without(ONE).expected[5] > 0.0
