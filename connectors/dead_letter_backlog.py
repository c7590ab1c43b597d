"""Dead letters that no sink has taken yet, in memory, up to a bound.

They need no file of their own: no snapshot covers their records before they are written, so whoever starts again reads
those records again.
"""

from collections.abc import Collection, Iterator

from connectors.dead_letter_headers import Origin
from streamlearn.errors import DeadLetterError
from streamlearn.stream.source import DeadLetter

MAX_BYTES = 64 << 20
"""Of keys, values and messages; behind it the daemon stops rather than drop one."""
_PER_LETTER = 500  # bytes of headers and objects, about


class DeadLetterBacklog:
    """Letters in order."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._letters: list[DeadLetter] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._letters)

    def __iter__(self) -> Iterator[DeadLetter]:
        return iter(self._letters)

    def add(self, letter: DeadLetter) -> None:
        """One more.

        Raises:
            DeadLetterError: there is no room for it.
        """
        size = _size(letter)
        if self._letters and self.bytes + size > self._max_bytes:
            raise DeadLetterError(
                f"dead letters must be taken, and {len(self)} wait ({self.bytes >> 20} MiB) because they were not: "
                "mend what the log tells of; a restart reads their records again"
            )
        self._letters.append(letter)
        self.bytes += size

    def clear(self) -> None:
        """All of them are written."""
        self._letters.clear()
        self.bytes = 0

    def drop(self, written: Collection[Origin]) -> None:
        """Those about these records are written."""
        self._letters = [each for each in self._letters if (each.record.origin, each.record.offset) not in written]
        self.bytes = sum(map(_size, self._letters))


def _size(letter: DeadLetter) -> int:
    record = letter.record
    return _PER_LETTER + len(letter.message) + len(record.value or b"") + len(record.key or b"")
