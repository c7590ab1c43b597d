"""Topics that are added to a run, taken out, put back or compacted: each record is trained once, whatever dies."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import pytest
from structlog.testing import capture_logs

from connectors.kafka.offsets import starting_offsets
from streamlearn.errors import SnapshotError
from streamlearn.events import Event
from streamlearn.learner.learner import Step
from streamlearn.settings import Settings
from streamlearn.status import Phase, Status
from streamlearn.stream.position import OffsetRange, Position, TopicPartition
from streamlearn.stream.record import Batch, Record
from tests.daemon.test_daemon import StopAfter, backbone, daemon_of, make, newest, opened, records
from tests.memory import MemorySource, records_from

__all__ = ["backbone", "make"]

A, B = TopicPartition("a", 0), TopicPartition("b", 0)
VALUES = records(40)
Logs = dict[str, list[bytes]]
"""The values in each topic that the run reads; compaction removed the empty ones."""


class Topics(MemorySource):
    """Topics that begin where Kafka's do, and what is produced after `seek`."""

    def __init__(self, logs: Logs, start: str, produced: Sequence[Record]) -> None:
        logged = [record for topic, values in logs.items() for record in records_from(values, topic)]
        super().__init__([record for record in logged if record.value])
        self._offset_start, self._produced = start, produced
        self.seeks = 0
        self.remembered: Mapping[str, str] | None = None
        self._ids = {topic: f"id of {topic}" for topic in logs}

    @property
    def identity(self) -> Mapping[str, str]:
        """An id of each topic that is read."""
        return self._ids

    def seek(
        self,
        position: Position,
        identity: Mapping[str, str] | None = None,
        skipped: Sequence[OffsetRange] = (),
    ) -> Position:
        """Begin as `starting_offsets` says; the first time, more records are produced then."""
        begins, ends = dict.fromkeys(self._ends, 0), dict(self._ends)
        starts = starting_offsets(position, begins, ends, "latest" if self._offset_start == "latest" else "earliest")
        super().seek(Position(starts), identity, skipped)
        if not self.seeks:
            self.append(*self._produced)
        self.seeks += 1
        self.remembered = identity
        return Position(starts)


class Trained(StopAfter):
    """The records that one process trained on, and what it published last; it may die after a step."""

    def __init__(self, source: Topics, dies_at: int = 0) -> None:
        super().__init__(dies_at)
        self.records: list[str] = []
        self.status = Status(Phase.STARTING)
        self.source = source

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        self.records += [f"{record.origin.topic}{record.offset}" for record in batch.records]
        self.status = status
        if step.number == self.step:
            raise KeyboardInterrupt


Learn = Callable[..., Trained]


@pytest.fixture
def learn(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Learn:
    """Run one process over some topics; it dies after the step `dies_at`."""

    def run(logs: Logs, start: str = "earliest", *, produced: Sequence[Record] = (), dies_at: int = 0) -> Trained:
        trained = Trained(Topics(logs, start, produced), dies_at)
        monkeypatch.setattr("streamlearn.daemon.build.open_source", lambda _: trained.source)
        settings = make([])
        rarely = settings.snapshot.model_copy(update={"every_records": 1000})  # at the start and at the end only
        with (
            opened(settings.model_copy(update={"snapshot": rarely})) as components,
            pytest.raises(KeyboardInterrupt) if dies_at else nullcontext(),
        ):
            daemon_of(components, trained).run()
        return trained

    return run


def test_where_a_new_topic_begins_is_durable_before_its_first_record(
    learn: Learn, make: Callable[..., Settings]
) -> None:
    """With `latest`: after a crash it begins at the same record again, although its log has grown since."""
    learn({"a": VALUES[:8]})
    late = records_from(VALUES[20:28], "b", start=4)
    first = learn({"a": VALUES[:8], "b": VALUES[:4]}, "latest", produced=late, dies_at=3)
    assert first.records == ["b4", "b5", "b6", "b7"]
    again = learn({"a": VALUES[:8], "b": [*VALUES[:4], *VALUES[20:28]]}, "latest")
    assert again.records == [f"b{offset}" for offset in range(4, 12)]
    snapshot = newest(make([]))
    assert snapshot.manifest.position == Position({A: 8, B: 12})
    assert snapshot.manifest.ledger == (("a", 0, 8, 0, 0, 0), ("b", 0, 8, 0, 0, 0))


def test_without_a_durable_start_of_a_new_topic_the_process_ends(learn: Learn, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that cannot be written, as a new run does."""
    learn({"a": VALUES[:8]})

    def fail(*_: object) -> None:
        raise SnapshotError("no room")

    monkeypatch.setattr("streamlearn.snapshot.store.SnapshotStore.save", fail)
    with pytest.raises(SnapshotError, match="no room"):
        learn({"a": VALUES[:8], "b": VALUES[8:12]})


def test_after_a_rollback_the_start_of_a_new_topic_is_durable_again(
    make: Callable[..., Settings], learn: Learn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot that the run goes back to may be older than the topic."""
    learn({"a": VALUES[:8]})
    source = Topics({"a": VALUES[:8], "b": VALUES[8:12]}, "latest", ())
    monkeypatch.setattr("streamlearn.daemon.build.open_source", lambda _: source)
    with opened(make([])) as components:
        daemon_of(components).restore_newest()
    assert newest(make([])).manifest.position == Position({A: 8, B: 4})


def test_a_topic_that_is_put_back_continues_where_it_was(learn: Learn, make: Callable[..., Settings]) -> None:
    """Nothing of it is trained twice or skipped, and the topics that were read meanwhile are not moved.

    While it is not read, its lag is unknown and its offset is not committed.
    """
    learn({"a": VALUES[:4], "b": VALUES[4:8]})
    alone = learn({"a": VALUES[8:16]}, "latest")
    assert alone.records == ["a4", "a5", "a6", "a7"]
    assert [(row.topic, row.position, row.lag) for row in alone.status.partitions] == [(A.topic, 8, 0)]
    assert alone.source.commits[-1][0] == Position({A: 8})
    again = learn({"a": VALUES[8:16], "b": VALUES[16:24]}, "latest")
    assert again.records == ["b4", "b5", "b6", "b7"]
    assert again.source.remembered == {"a": "id of a", "b": "id of b"}
    snapshot = newest(make([]))
    assert snapshot.manifest.position == Position({A: 8, B: 8})
    assert snapshot.manifest.ledger == (("a", 0, 8, 0, 0, 0), ("b", 0, 8, 0, 0, 0))


def test_journalled_records_of_a_topic_that_is_not_read_are_trained_when_it_is_put_back(learn: Learn) -> None:
    """Their batches are formed anew; each record is trained once in the run that the snapshots tell of."""
    learn({"a": VALUES[:8], "b": VALUES[8:16]}, dies_at=3)
    with capture_logs() as logs:
        rest = learn({"a": VALUES[:8]})
    (dropped,) = [entry for entry in logs if entry["event"] == Event.JOURNAL_TRUNCATED]
    assert dropped["fault"] == "offset 0 of b-0 must be read again and its topic is not read"
    assert rest.records == [f"a{offset}" for offset in range(8)]
    assert learn({"a": VALUES[:8], "b": VALUES[8:16]}).records == [f"b{offset}" for offset in range(8)]


def test_what_was_compacted_before_it_was_read_again_is_left_out_and_the_rest_trained_once(
    learn: Learn, make: Callable[..., Settings]
) -> None:
    """Two partitions: no record of the other waits for one that is gone."""
    learn({"a": VALUES[:8], "b": VALUES[8:16]}, dies_at=3)
    rest = learn({"a": [*VALUES[:7], b""], "b": VALUES[8:16]})
    assert rest.records == [*(f"a{offset}" for offset in range(7)), *(f"b{offset}" for offset in range(8))]
    assert newest(make([])).manifest.ledger == (("a", 0, 7, 0, 0, 0), ("b", 0, 8, 0, 0, 0))


def test_of_one_partition_a_change_of_its_batches_is_logged(learn: Learn, make: Callable[..., Settings]) -> None:
    """Compaction removed a record that a batch had before the crash."""
    learn({"a": VALUES}, dies_at=3)
    with capture_logs() as logs:
        rest = learn({"a": [VALUES[0], b"", *VALUES[2:]]})
    (entry,) = [entry for entry in logs if entry["event"] == Event.JOURNAL_TRUNCATED]
    assert entry["fault"] == "the batch of step 1 has other records"
    assert rest.records == ["a0", *(f"a{offset}" for offset in range(2, len(VALUES)))]
    assert newest(make([])).manifest.ledger == (("a", 0, len(VALUES) - 1, 0, 0, 0),)
