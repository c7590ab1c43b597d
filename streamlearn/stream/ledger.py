"""The ledger of records per partition: trained, dead-lettered, or held out."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from streamlearn.stream.batch import Batch
from streamlearn.stream.record import Position, TopicPartition


@dataclass
class Ledger:
    """Counts that add up: records read = trained + dead-lettered + held out. The position follows the last of them."""

    position: Position = field(default_factory=Position)
    trained: Counter[TopicPartition] = field(default_factory=Counter)
    dead_lettered: Counter[TopicPartition] = field(default_factory=Counter)
    held_out: Counter[TopicPartition] = field(default_factory=Counter)

    def account(self, batch: Batch, *, refused: bool, held_out: Collection[int] = ()) -> None:
        """Count a batch: its records were trained on, or dead-lettered if the update was refused.

        `held_out` holds the indices of records that were evaluated only.
        """
        self.dead_lettered.update(dead_lettered.id.origin for dead_lettered in batch.dead_lettered)
        column = self.dead_lettered if refused else self.trained
        for index, record in enumerate(batch.records):
            (self.held_out if index in held_out else column)[record.origin] += 1
        self.position = Position({**self.position, **{run.origin: run.next_offset for run in batch.runs}})

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """Topic, partition, trained, dead-lettered, held out: one row per partition, sorted."""
        origins = sorted(set(self.position) | set(self.trained) | set(self.dead_lettered) | set(self.held_out))
        return [(o.topic, o.partition, self.trained[o], self.dead_lettered[o], self.held_out[o]) for o in origins]

    @classmethod
    def restore(cls, position: Position, rows: Iterable[tuple[str, int, int, int, int]]) -> "Ledger":
        """The inverse of `rows`, with the position of the same snapshot."""
        ledger = cls(position)
        for topic, partition, trained, dead_lettered, held_out in rows:
            origin = TopicPartition(topic, partition)
            ledger.trained[origin], ledger.dead_lettered[origin] = trained, dead_lettered
            ledger.held_out[origin] = held_out
        return ledger
