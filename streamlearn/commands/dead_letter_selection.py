"""Which dead letters a command is about."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from connectors.stored_dead_letter import StoredDeadLetter, parse_where
from streamlearn.errors import Reason, UsageError
from streamlearn.stream.record import RecordId


@dataclass(frozen=True)
class DeadLetterSelection:
    """Filters that must all hold; without any, every dead letter is selected."""

    records: frozenset[RecordId] = frozenset()
    reasons: frozenset[str] = frozenset()
    topic: str | None = None
    partition: int | None = None

    @classmethod
    def of(
        cls,
        where: Iterable[str] = (),
        reasons: Iterable[str] = (),
        topic: str | None = None,
        partition: int | None = None,
    ) -> Self:
        """Read the options of a command.

        Raises:
            UsageError: a record is not TOPIC:PARTITION:OFFSET, or a reason is not known.
        """
        names = [each.value for each in Reason]
        for reason in reasons:
            if reason not in names:
                raise UsageError(f"--reason {reason} is not known: expected one of {', '.join(names)}")
        return cls(frozenset(map(parse_where, where)), frozenset(reasons), topic, partition)

    @property
    def is_everything(self) -> bool:
        """Whether there is no filter."""
        return self == DeadLetterSelection()

    def select(self, dead_letters: Iterable[StoredDeadLetter]) -> Iterator[StoredDeadLetter]:
        """Yield the dead letters that are selected."""
        return filter(self._selects, dead_letters)

    def _selects(self, dead_letter: StoredDeadLetter) -> bool:
        origin = dead_letter.record.origin
        return (
            (not self.records or dead_letter.record.id in self.records)
            and (not self.reasons or dead_letter.reason in self.reasons)
            and self.topic in (None, origin.topic)
            and self.partition in (None, origin.partition)
        )
