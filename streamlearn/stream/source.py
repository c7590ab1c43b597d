"""The protocols of a connector: a source of records and a sink of dead letters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamlearn.stream.position import Gap, OffsetRange, Position, RecordId, TopicPartition
from streamlearn.stream.record import Record


class Source(Protocol):
    """A partitioned stream that can be read again from any position.

    Order of calls: `seek` once, then `poll`, `commit` and `lag` in any order from one thread, then `close`.
    """

    def seek(
        self,
        position: Position,
        identity: Mapping[str, str] | None = None,
        skipped: Sequence[OffsetRange] = (),
    ) -> Position:
        """Go to `position` and return where reading begins; `identity` is the identity when `position` was taken.

        - A partition that `position` names begins at its offset. If the log no longer holds that offset and the
          source's settings allow gaps, it begins at a later one.
        - A new partition of a topic that `position` names begins at its earliest record.
        - Any other partition begins where the source's settings say (earliest or latest).
        - What `position` names of topics that are not read is left out. The caller keeps it.

        An operator skips the records in `skipped`. `poll` returns them too, and where it cannot read such an offset, a
        record without content for each offset up to the end of the range.

        Raises:
            OffsetGapError: the log no longer holds a named offset, has never reached it, or is another log of the same
                name.
            SourceError: the source cannot be reached.
        """

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """Return what is ready, in offset order per partition; empty when nothing arrived within `timeout_s`.

        Blocks for at most `timeout_s` seconds. A record is returned once per `seek`.

        Raises:
            OffsetGapError: retention overtook the position, and the source's settings do not allow gaps.
            SourceError: the source cannot recover by itself; a restart may help.
        """

    @property
    def gaps(self) -> Sequence[Gap]:
        """What `poll` skipped since `seek`, oldest first; what `seek` itself skipped is not included."""

    @property
    def reached(self) -> Mapping[TopicPartition, int]:
        """Per partition, an offset before which `poll` returns nothing more; it may lag behind what was read."""

    @property
    def exhausted(self) -> bool:
        """Whether `poll` will never return anything again. An endless stream is never exhausted."""

    def commit(self, position: Position, note: str) -> None:
        """Publish that a snapshot on disk covers every record before `position`; `note` names the snapshot.

        For lag dashboards only: start-up never reads it back. The source logs a failure and does not raise it.
        """

    def lag(self, position: Position) -> Mapping[TopicPartition, int]:
        """Records between `position` and the end of each log, at most `lag_interval_s` old; empty when unknown."""

    @property
    def identity(self) -> Mapping[str, str]:
        """The id of each topic, which another topic of the same name would not have; topics without one are omitted."""

    def close(self) -> None:
        """Release the source. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be used, and the reason."""

    record: Record
    """As it was read; read back without value, key and headers if `left_out_bytes` is set."""
    reason: str
    """A `Reason`; read back it may be that of another release."""
    message: str
    written_ms: int | None = None
    """When the broker stored it, Unix time in milliseconds; None before that, and in a file."""
    left_out_bytes: int | None = None
    """Size of the record's value if the record was too large for the dead-letter topic; None if it is whole."""


class DeadLetters(Protocol):
    """An append-only sink for unusable records; its reader sees each record exactly once.

    1. `recall(mark)` after a start, with the mark of the restored snapshot: the dead letters written after it.
    2. `send` each dead letter that is not among them.
    3. `flush` and `mark` for each snapshot: the dead letters of all records that it covers are durable first.
    """

    def recall(self, mark: Mapping[str, Any] | None) -> frozenset[RecordId]:
        """The records of the dead letters written after `mark`, or since the sink was created if it is None."""

    def send(self, dead_letter: DeadLetter) -> None:
        """Append one dead letter; may buffer it.

        Raises:
            DeadLetterError: the sink does not accept it.
        """

    def flush(self) -> None:
        """Block until every dead letter that was sent is durable.

        Raises:
            DeadLetterError: the sink could not make them durable.
        """

    def mark(self) -> Mapping[str, Any]:
        """A bookmark of the sink's end at the last `flush`, JSON-ready."""

    def close(self) -> None:
        """Release the sink. Safe to call twice."""
