"""What the operator's controls add up to, as it is kept in the state folder."""

import zlib
from dataclasses import dataclass
from typing import Any, Self

import orjson

from streamlearn.stream.offset_range import OffsetRange

VERSION = 1


class OtherVersionError(ValueError):
    """The content is intact, and of another version."""


@dataclass(frozen=True, slots=True)
class ControlState:
    """Pause, pins, skipped records, and a rollback that is under way."""

    paused: bool = False
    """Whether no step is taken and no record is read."""
    pins: frozenset[str] = frozenset()
    """Names of the snapshots that are never pruned."""
    skipped: tuple[OffsetRange, ...] = ()
    """Records that are never trained on from here on, sorted."""
    rolling_back_to: str | None = None
    """Name of the snapshot of a rollback that was decided and is not finished."""

    def to_bytes(self) -> bytes:
        """One line of JSON with a checksum."""
        body = {
            "version": VERSION,
            "paused": self.paused,
            "pins": sorted(self.pins),
            "skipped": [each.to_json() for each in self.skipped],
            "rolling_back_to": self.rolling_back_to,
        }
        return orjson.dumps({**body, "crc32": _checksum(body)}, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of `to_bytes`.

        Raises:
            OtherVersionError: another release wrote it.
            ValueError, KeyError, TypeError: it is damaged.
        """
        body = orjson.loads(data)
        if body.pop("crc32") != _checksum(body):
            raise ValueError("the checksum differs")
        if body["version"] != VERSION:
            raise OtherVersionError(body["version"])
        skipped = tuple(OffsetRange.from_json(row) for row in body["skipped"])
        return cls(bool(body["paused"]), frozenset(body["pins"]), skipped, body["rolling_back_to"])


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))
