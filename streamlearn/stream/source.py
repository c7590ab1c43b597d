"""What a connector must be able to do: the source of records and the sink of dead letters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamlearn.errors import Reason
from streamlearn.stream.record import Gap, Position, Record, TopicPartition


class Source(Protocol):
    """A partitioned stream that can be read again from any position.

    Order of use: `seek` once, then `poll`, `commit` and `lag` in any order from one thread, then `close`.
    """

    def seek(self, position: Position, identity: Mapping[str, str] | None = None) -> Position:
        """Go to `position` and return where reading really begins; `identity` is what it was when `position` was taken.

        Partitions that `position` does not name begin where the source's own setting says (earliest or latest); those
        that were added to a topic which it names, at their earliest record. A named partition begins behind its offset
        where the log no longer holds that and the source's own setting allows the gap.

        Raises:
            OffsetGapError: the log no longer holds a named offset, never reached it, or is another one by that name.
            SourceError: the source cannot be reached.
        """

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """Return what is ready, in offset order per partition; empty when nothing came within `timeout_s`.

        Blocks at most `timeout_s` seconds. A record is returned once per `seek`.

        Raises:
            OffsetGapError: retention overtook the position, and no setting allows to go on behind the gap.
            SourceError: the source is broken for good; restarting may help.
        """

    def commit(self, position: Position, note: str) -> None:
        """Tell the outside that a snapshot on disk covers every record before `position`; `note` names the snapshot.

        For lag dashboards alone: start-up never reads it back. A failure is logged by the source, not raised.
        """

    def lag(self, position: Position) -> Mapping[TopicPartition, int]:
        """Records between `position` and the end of each log, at most `lag_interval_s` old; empty when unknown."""

    @property
    def identity(self) -> Mapping[str, str]:
        """By topic, what tells it from another one of the same name; a topic without such a thing is left out."""

    @property
    def gaps(self) -> Sequence[Gap]:
        """What `poll` jumped over since `seek`, oldest first; what `seek` itself jumped over is not in it."""

    @property
    def exhausted(self) -> bool:
        """Whether `poll` will never return anything again. An endless stream is never exhausted."""

    def close(self) -> None:
        """Release the source. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be used, with the reason, as it goes to the sink."""

    record: Record
    reason: Reason
    message: str


class DeadLetters(Protocol):
    """An append-only sink for unusable records, exactly once as seen by its reader.

    1. `recall(mark)` after a start, with the mark of the restored snapshot: which letters a dead daemon already wrote.
    2. `send` each letter that is not among them.
    3. `flush` and `mark` for each snapshot: every letter of a record that it covers is durable first.
    """

    def recall(self, mark: Mapping[str, Any] | None) -> frozenset[tuple[TopicPartition, int]]:
        """Origins and offsets of the letters written after `mark`; None means since the sink began."""

    def send(self, letter: DeadLetter) -> None:
        """Append one letter; may buffer.

        Raises:
            DeadLetterError: the sink does not take it.
        """

    def flush(self) -> None:
        """Block until every sent letter is durable.

        Raises:
            DeadLetterError: it cannot be made so.
        """

    def mark(self) -> Mapping[str, Any]:
        """A JSON-ready bookmark of the sink's end, as of the last `flush`."""

    def close(self) -> None:
        """Release the sink. Safe to call twice."""
