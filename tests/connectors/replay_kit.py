"""Dead letters to replay, and a target that may be killed."""

from collections.abc import Sequence
from typing import Any

from connectors.dead_letters import Repair, StoredDeadLetter
from streamlearn.stream.record import Record, TopicPartition


class KilledError(Exception):
    """Stands for kill -9: nothing of the process runs after it."""


def dead_letter(offset: int, value: bytes | None = None, **fields: Any) -> StoredDeadLetter:
    """A dead letter of the first partition of `records`."""
    content = b'{"text": "%d"}' % offset if value is None else value
    record = Record(TopicPartition("records", 0), offset, content, timestamp_ms=1_700_000_000_000 + offset)
    return StoredDeadLetter(record, **{"reason": "not_json", "stage": "VALUE_CONVERTER", "message": "no", **fields})


def repairs(*offsets: int) -> list[Repair]:
    """The dead letters at these offsets, each with its own value."""
    return [Repair(each, each.record.value or b"") for each in map(dead_letter, offsets)]


class ListTarget:
    """A list; `kill_before` and `kill_after` end the process around the next put."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.kill_before = self.kill_after = False

    def plan(self, repairs: Sequence[Repair]) -> dict[str, Any]:
        """The length of the list."""
        return {"length": len(self.values)}

    def put(self, repairs: Sequence[Repair]) -> None:
        """Append all, unless killed before."""
        if self.kill_before:
            raise KilledError
        self.values += [repair.value for repair in repairs]
        if self.kill_after:
            raise KilledError

    def arrived(self, plan: dict[str, Any]) -> bool:
        """Whether the list has grown."""
        return len(self.values) > int(plan["length"])

    def close(self) -> None:
        """Nothing to release."""
