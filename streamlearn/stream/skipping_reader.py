"""A stream without the records that an operator skips.

What comes after this reader (merging, batches, shift detection, training) cannot tell the stream from one that never
had those records, so the outcome is the same, bit for bit. They become dead letters here, and the position moves past
them as past a gap: once every record before them is accounted for.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from streamlearn.errors import Reason
from streamlearn.stream.batch import PartitionRun
from streamlearn.stream.intake import DeadLetterWriter
from streamlearn.stream.offset_range import OffsetRange
from streamlearn.stream.record import Gap, Position, Record, TopicPartition
from streamlearn.stream.source import RecordReader

_MESSAGE = "an operator rolled back and skipped offsets {range}"


class SkippingReader:
    """A positioned source without the records in some ranges."""

    def __init__(
        self,
        source: RecordReader,
        position: Position,
        skipped: Sequence[OffsetRange],
        dead_letters: DeadLetterWriter,
    ) -> None:
        """`position` is where `source` stands."""
        self._source = source
        self._ranges = skipped
        self._dead_letters = dead_letters
        self._begins: dict[TopicPartition, int] = dict(position)
        self._next: dict[TopicPartition, int] = dict(position)
        self._passed: dict[TopicPartition, deque[PartitionRun]] = defaultdict(deque)

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """What the source returns, without skipped records.

        Raises:
            SourceError: see `RecordReader`.
            DeadLetterError: the sink does not accept a skipped record.
        """
        records = self._source.poll(max_records=max_records, timeout_s=timeout_s)
        if not self._ranges:
            return records
        return [record for record in records if not self._skip(record)]

    @property
    def gaps(self) -> Sequence[Gap]:
        """Those of the source; skipped records are none."""
        return self._source.gaps

    @property
    def reached(self) -> Mapping[TopicPartition, int]:
        """That of the source."""
        return self._source.reached

    @property
    def exhausted(self) -> bool:
        """Whether the source is."""
        return self._source.exhausted

    def take_passed(self, position: Position) -> list[PartitionRun]:
        """Return the skipped records that directly follow `position`, each run once, in order per partition."""
        taken = []
        for origin, runs in self._passed.items():
            reached = position.get(origin, self._begins[origin])
            while runs and runs[0].first_offset <= reached:
                taken.append(runs.popleft())
                reached = max(reached, taken[-1].next_offset)
        return taken

    def _skip(self, record: Record) -> bool:
        """Note that the record was read; set it aside if it is to be skipped."""
        origin, offset = record.id
        self._begins.setdefault(origin, offset)
        expected = self._next.get(origin, offset)
        self._next[origin] = offset + 1
        within = next((each for each in self._ranges if record.id in each), None)
        if within is None:
            return False
        self._dead_letters.send(record, Reason.SKIPPED, _MESSAGE.format(range=within))
        runs = self._passed[origin]
        if runs and runs[-1].next_offset == expected:
            runs[-1] = runs[-1]._replace(next_offset=offset + 1, num_records=runs[-1].num_records + 1)
        else:
            runs.append(PartitionRun(origin.topic, origin.partition, expected, offset + 1, 1))
        return True
