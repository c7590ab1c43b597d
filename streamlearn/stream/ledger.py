"""What became of every record: trained or set aside, per partition."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamlearn.stream.batch import Batch
from streamlearn.stream.record import Position, TopicPartition


@dataclass
class Ledger:
    """Counts that add up: records read = trained + dead-lettered, and the position behind the last of them."""

    position: Position = field(default_factory=Position)
    trained: Counter[TopicPartition] = field(default_factory=Counter)
    dead_lettered: Counter[TopicPartition] = field(default_factory=Counter)

    def account(self, batch: Batch, *, refused: bool) -> None:
        """Enter a batch: its records were trained on, or set aside when its update was refused."""
        self.dead_lettered.update(rejected.id.origin for rejected in batch.rejected)
        column = self.dead_lettered if refused else self.trained
        column.update(record.origin for record in batch.records)
        self.position = Position({**self.position, **{run.origin: run.next_offset for run in batch.runs}})

    def rows(self) -> list[tuple[str, int, int, int]]:
        """Topic, partition, trained, dead-lettered: one row a partition, sorted."""
        origins = sorted(set(self.position) | set(self.trained) | set(self.dead_lettered))
        return [(o.topic, o.partition, self.trained[o], self.dead_lettered[o]) for o in origins]

    @classmethod
    def restore(cls, position: Position, rows: Iterable[tuple[str, int, int, int]]) -> "Ledger":
        """The inverse of `rows`, with the position that belongs to them."""
        ledger = cls(position)
        for topic, partition, trained, dead_lettered in rows:
            ledger.trained[TopicPartition(topic, partition)] = trained
            ledger.dead_lettered[TopicPartition(topic, partition)] = dead_lettered
        return ledger
