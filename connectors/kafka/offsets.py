"""Where reading begins in each partition, and whether the log still holds that offset."""

from collections.abc import Collection, Mapping
from typing import Literal

from streamlearn.errors import OffsetGapError
from streamlearn.stream.record import TopicPartition

Offsets = Mapping[TopicPartition, int]
GapPolicy = Literal["fail", "earliest", "latest"]


def starting_offsets(
    position: Offsets,
    begins: Offsets,
    ends: Offsets,
    offset_start: Literal["earliest", "latest"],
    gap_policy: GapPolicy = "fail",
) -> dict[TopicPartition, int]:
    """The first offset to read of every partition that exists.

    1. A partition that `position` names goes on there, or behind a gap: see `going_on`.
    2. Another partition of a topic that `position` names was created later: it begins at its earliest record.
    3. A partition of an unknown topic begins where `offset_start` says.

    Raises:
        OffsetGapError: a named offset is gone and must not be, was never reached, or its whole partition is gone.
    """
    known_topics = {origin.topic for origin in position}
    check_partitions_exist({origin: position[origin] for origin in position}, begins)
    starts = {}
    for origin in sorted(begins):
        if origin in position:  # 1.
            starts[origin] = going_on(origin, position[origin], begins[origin], ends[origin], gap_policy)
        elif origin.topic in known_topics or offset_start == "earliest":  # 2., 3.
            starts[origin] = begins[origin]
        else:  # 3.
            starts[origin] = ends[origin]
    return starts


def going_on(origin: TopicPartition, offset: int, begin: int, end: int, gap_policy: GapPolicy) -> int:
    """`offset` while the log holds it; where its beginning has overtaken it, what `gap_policy` says.

    Raises:
        OffsetGapError: it lies before the log and the policy is to fail, or behind it; the message names the gap.
    """
    if offset < begin and gap_policy == "fail":
        raise OffsetGapError(
            f"{origin} goes on at offset {offset}, its log begins at {begin}: the {begin - offset} offsets [{offset}, "
            f"{begin}) were deleted before they were trained. Set offset.gap.policy to earliest (or latest) to go on "
            "without them, or start with --fresh to forget what was learned; and raise the topic's retention.ms"
        )
    if offset > end:
        raise OffsetGapError(
            f"{origin} goes on at offset {offset}, its log ends at {end}: [{end}, {offset}) was trained and "
            "is gone: the topic was deleted and created again, or truncated. Start with --fresh to learn the new log"
        )
    if offset < begin:
        return begin if gap_policy == "earliest" else end
    return offset


def check_partitions_exist(position: Offsets, existing: Collection[TopicPartition]) -> None:
    """Every named partition of a topic that is read must exist.

    Raises:
        OffsetGapError: a partition with trained records is gone.
    """
    topics = {origin.topic for origin in existing}
    for origin, offset in position.items():
        if origin.topic in topics and origin not in existing:
            raise OffsetGapError(
                f"{origin} was trained up to offset {offset} and does not exist any more: the topic was deleted and "
                "created again with fewer partitions. Start with --fresh to learn the new one"
            )
