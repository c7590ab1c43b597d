"""A bounded in-memory backlog of dead letters that the sink has not accepted yet.

The backlog needs no file: no snapshot covers these records before their dead letters are durable, so a restarted daemon
reads them again.
"""

from collections.abc import Collection, Iterator

from streamlearn.errors import DeadLetterError
from streamlearn.stream.record import RecordId
from streamlearn.stream.source import DeadLetter

MAX_BYTES = 64 << 20
"""Maximum size of keys, values and messages in bytes; beyond it the daemon stops rather than drop a dead letter."""
_OVERHEAD_BYTES = 500  # headers and objects of one dead letter, approximately


class DeadLetterBacklog:
    """Dead letters in order."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._dead_letters: list[DeadLetter] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._dead_letters)

    def __iter__(self) -> Iterator[DeadLetter]:
        return iter(self._dead_letters)

    def has_room_for(self, dead_letter: DeadLetter) -> bool:
        """Return whether `add` accepts it; an empty backlog accepts one of any size."""
        return not self._dead_letters or self.bytes + _size(dead_letter) <= self._max_bytes

    def add(self, dead_letter: DeadLetter) -> None:
        """Append one dead letter.

        Raises:
            DeadLetterError: the backlog is full.
        """
        if not self.has_room_for(dead_letter):
            raise DeadLetterError(
                f"the dead-letter sink must accept dead letters, found {len(self)} waiting ({self.bytes >> 20} MiB): "
                "fix the error in the log, then restart; the restart reads their records again"
            )
        self._dead_letters.append(dead_letter)
        self.bytes += _size(dead_letter)

    def clear(self) -> None:
        """Remove all of them, after they were written."""
        self._dead_letters.clear()
        self.bytes = 0

    def drop(self, written: Collection[RecordId]) -> None:
        """Remove those of these records, which are written already."""
        self._dead_letters = [each for each in self._dead_letters if each.record.id not in written]
        self.bytes = sum(map(_size, self._dead_letters))


def _size(dead_letter: DeadLetter) -> int:
    record = dead_letter.record
    return _OVERHEAD_BYTES + len(dead_letter.message) + len(record.value or b"") + len(record.key or b"")
