"""Checks of a topic: its id, and the operations that it allows."""

import pytest
from kafka.admin import ACLOperation

from connectors.kafka.admin import Topic, check_identity, identity_of, topic_of
from streamlearn.errors import OffsetGapError
from tests.connectors.kafka.kit import settings


def test_a_topic_is_identified_by_its_id() -> None:
    """Another id under the same name is another topic; an id that one side lacks is not checked."""
    now = identity_of([Topic("a", "7f", (0,)), Topic("old", "", (0,))])
    assert now == {"a": "7f"}
    for before in ({}, {"a": "7f"}, {"old": "3c"}, {"no longer read": "3c"}):
        check_identity(before, now)
    with pytest.raises(
        OffsetGapError, match=r"topic a must have the same id as .* 3c, found 7f: .* created again.* --fresh"
    ):
        check_identity({"a": "3c"}, now)


@pytest.mark.parametrize(
    "reported", [{}, {"authorized_operations": []}, {"authorized_operations": ["DESCRIBE", "READ"]}]
)
def test_without_reported_operations_all_are_assumed_to_be_allowed(reported: dict[str, list[str]]) -> None:
    """Brokers before Kafka 2.3 do not report them; a forbidden operation fails later."""
    entry = {
        "error_code": 0,
        "topic_id": None,
        "partitions": [{"partition_index": 1}, {"partition_index": 0}],
        **reported,
    }
    assert topic_of(settings(), "t", entry, [ACLOperation.READ]) == Topic("t", "", (0, 1))
