"""The offset at which reading begins in each partition, and the check that the log still holds it."""

from collections.abc import Collection, Mapping
from typing import Literal

from streamlearn.errors import OffsetGapError
from streamlearn.stream.record import TopicPartition

Offsets = Mapping[TopicPartition, int]
GapPolicy = Literal["fail", "earliest", "latest"]
IsolationLevel = Literal["read_committed", "read_uncommitted"]

_OPEN_TRANSACTION: Mapping[IsolationLevel, str] = {
    "read_committed": (
        "A transaction may be open there if isolation.level was read_uncommitted before: restart when it has ended. "
        "Otherwise "
    ),
    "read_uncommitted": "",
}


def starting_offsets(
    position: Offsets,
    begins: Offsets,
    ends: Offsets,
    offset_start: Literal["earliest", "latest"],
    gap_policy: GapPolicy = "fail",
    isolation_level: IsolationLevel = "read_committed",
) -> dict[TopicPartition, int]:
    """Return the first offset to read of every existing partition.

    1. A partition that `position` names continues at its offset, or after a gap: see `resume_offset`.
    2. Another partition of a topic that `position` names was created later: it begins at its earliest record.
    3. A partition of a new topic begins where `offset_start` says.

    Raises:
        OffsetGapError: a named offset was deleted and gaps are not allowed, was never reached, or its whole partition
            is gone.
    """
    known_topics = {origin.topic for origin in position}
    check_partitions_exist({origin: position[origin] for origin in position}, begins)
    starts = {}
    for origin in sorted(begins):
        if origin in position:  # 1.
            starts[origin] = resume_offset(
                origin, position[origin], begins[origin], ends[origin], gap_policy, isolation_level
            )
        elif origin.topic in known_topics or offset_start == "earliest":  # 2., 3.
            starts[origin] = begins[origin]
        else:  # 3.
            starts[origin] = ends[origin]
    return starts


def resume_offset(
    origin: TopicPartition, offset: int, begin: int, end: int, gap_policy: GapPolicy, isolation_level: IsolationLevel
) -> int:
    """Return `offset` if the log holds it; if retention deleted it, the offset that `gap_policy` chooses.

    With `read_committed`, the log ends where the first open transaction begins.

    Raises:
        OffsetGapError: the offset was deleted and the policy is `fail`, or it lies past the end; the message names the
            gap.
    """
    if offset < begin and gap_policy == "fail":
        raise OffsetGapError(
            f"{origin} must resume at offset {offset}, its log begins at {begin}: the {begin - offset} offsets "
            f"[{offset}, {begin}) were deleted before they were trained. Set offset.gap.policy to earliest (or latest) "
            "to continue without them, or start over with --fresh. Raise the topic's "
            "retention.ms"
        )
    if offset > end:
        raise OffsetGapError(
            f"{origin} must resume at offset {offset}, its log ends at {end}. {_OPEN_TRANSACTION[isolation_level]}"
            f"[{end}, {offset}) was trained and is gone: the topic was truncated, or deleted and created again. Start "
            "over with --fresh to learn the new log"
        )
    if offset < begin:
        return begin if gap_policy == "earliest" else end
    return offset


def check_partitions_exist(position: Offsets, existing: Collection[TopicPartition]) -> None:
    """Check that every named partition of an existing topic exists.

    Raises:
        OffsetGapError: a partition with trained records is gone.
    """
    topics = {origin.topic for origin in existing}
    for origin, offset in position.items():
        if origin.topic in topics and origin not in existing:
            raise OffsetGapError(
                f"{origin} was trained up to offset {offset} and no longer exists: the topic was deleted and created "
                "again with fewer partitions. Start over with --fresh to learn the new one"
            )
