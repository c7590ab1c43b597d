"""The offsets at which reading begins."""

import pytest

from connectors.kafka.offsets import GapPolicy, starting_offsets
from streamlearn.errors import OffsetGapError
from streamlearn.stream.record import TopicPartition

A, B, NEW = TopicPartition("a", 0), TopicPartition("b", 0), TopicPartition("a", 1)


def test_named_partitions_continue_and_others_begin_where_the_setting_says() -> None:
    """A new topic follows offset.start; a new partition of a known topic begins at its first record."""
    begins, ends = {A: 3, B: 5, NEW: 7}, {A: 30, B: 50, NEW: 70}
    assert starting_offsets({A: 10}, begins, ends, "latest") == {A: 10, NEW: 7, B: 50}
    assert starting_offsets({}, begins, ends, "latest") == {A: 30, NEW: 70, B: 50}
    assert starting_offsets({}, begins, ends, "earliest") == begins


@pytest.mark.parametrize("policy", ["fail", "earliest", "latest"])
@pytest.mark.parametrize("offset", [3, 30])
def test_the_ends_of_the_log_are_no_gap(offset: int, policy: GapPolicy) -> None:
    """Resuming at the first record, or after the last one, misses nothing."""
    assert starting_offsets({A: offset}, {A: 3}, {A: 30}, "earliest", policy) == {A: offset}


def test_after_a_gap_reading_continues_where_the_policy_says() -> None:
    """At the first remaining record or at the log's end; a partition without a gap is not moved."""
    begins, ends = {A: 3, NEW: 0}, {A: 30, NEW: 9}
    assert starting_offsets({A: 2, NEW: 5}, begins, ends, "latest", "earliest") == {A: 3, NEW: 5}
    assert starting_offsets({A: 2, NEW: 5}, begins, ends, "earliest", "latest") == {A: 30, NEW: 5}


@pytest.mark.parametrize("policy", ["fail", "earliest", "latest"])
def test_no_policy_goes_back(policy: GapPolicy) -> None:
    """Trained records past the log's end mean another log; going back would train their offsets again."""
    with pytest.raises(OffsetGapError, match=r"\[30, 31\) was trained and is gone"):
        starting_offsets({A: 31}, {A: 3}, {A: 30}, "earliest", policy)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (
            2,
            r"a-0 must resume at offset 2, its log begins at 3: the 1 offsets \[2, 3\) .*offset\.gap\.policy.*--fresh",
        ),
        (31, r"a-0 must resume at offset 31, its log ends at 30\. .*\[30, 31\) was trained and is gone.* --fresh"),
    ],
)
def test_a_gap_is_named_exactly(offset: int, message: str) -> None:
    """The message names the missing offsets and the remedies."""
    with pytest.raises(OffsetGapError, match=message):
        starting_offsets({A: offset}, {A: 3}, {A: 30}, "earliest")


def test_a_partition_that_is_gone_is_a_gap() -> None:
    """A trained partition of a configured topic must exist; a topic that is no longer configured may be gone."""
    with pytest.raises(OffsetGapError, match="a-1 was trained up to offset 9 and no longer exists"):
        starting_offsets({A: 5, NEW: 9}, {A: 3}, {A: 30}, "earliest")
    assert starting_offsets({A: 5, B: 9}, {A: 3}, {A: 30}, "earliest") == {A: 5}


def test_an_offset_past_committed_records_may_lie_in_an_open_transaction() -> None:
    """After a change from read_uncommitted the log seems to end where the transaction begins; then nothing is gone."""
    position, begins, ends = {A: 31}, {A: 3}, {A: 30}
    with pytest.raises(
        OffsetGapError, match=r"transaction may be open there .*: restart when it has ended\. Otherwise"
    ):
        starting_offsets(position, begins, ends, "earliest", isolation_level="read_committed")
    with pytest.raises(OffsetGapError, match=r"its log ends at 30\. \[30, 31\) was trained and is gone"):
        starting_offsets(position, begins, ends, "earliest", isolation_level="read_uncommitted")
