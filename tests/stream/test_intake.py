"""From the source to the batch: each record is batched or becomes a dead letter."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest
from structlog.testing import capture_logs

from connectors.memory import MemoryDeadLetters, MemorySource
from streamlearn.errors import DeadLetterError, Reason
from streamlearn.events import Event
from streamlearn.settings import StreamSettings
from streamlearn.stream.batch import MAX_DEAD_LETTERED, Batch, Batcher, DeadLetteredRecord, PartitionRun, runs_of
from streamlearn.stream.intake import DeadLetterWriter, FlushReason, GivenUp, Intake, Mark, Merger
from streamlearn.stream.record import Record, RecordId
from streamlearn.stream.source import DeadLetter
from tests.stream.test_batch import BAD, ONE, LengthDecoder, records_of
from tests.stream.test_linger import SetClock

SETTINGS = StreamSettings(batch_records=2, batch_tokens=20, max_tokens=20)


class Bench:
    """An intake with access to its source and its sink."""

    decodes_ahead = False
    """Set by the fixture `both_ways`."""

    def __init__(
        self,
        lengths: list[int],
        *,
        sink: MemoryDeadLetters | None = None,
        given_up: GivenUp = MappingProxyType({}),
        endless: bool = False,
        journalled: Sequence[PartitionRun | Mark] = (),
    ) -> None:
        self.records = records_of(lengths)
        self.source = MemorySource(self.records, endless=endless)
        self.clock = SetClock()
        self.sink = sink or MemoryDeadLetters()
        self.decoder = LengthDecoder()
        self.intake = Intake(
            Merger(self.source, journalled),
            self.decoder,
            Batcher(SETTINGS),
            DeadLetterWriter(self.sink, self.sink.recall(None)),
            max_records=100,
            given_up=given_up,
            ahead=ThreadPoolExecutor(1) if self.decodes_ahead else None,
            linger_s=10.0,
            clock=self.clock,
        )

    def batches(self) -> list[Batch]:
        """All batches to the end of the source; dead letters are flushed then."""
        batches = []
        while (batch := self.intake.next_batch(timeout_s=0.0)) is not None:
            batches.append(batch)
        assert self.source.exhausted
        batches += self.intake.flush()
        self.sink.flush()
        return batches

    def dead_lettered_offsets(self) -> list[int]:
        return [dead_letter.record.offset for dead_letter in self.sink.flushed]


@pytest.fixture(autouse=True, params=["on request", "ahead"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome is the same with and without decoding ahead."""
    monkeypatch.setattr(Bench, "decodes_ahead", request.param == "ahead")


def test_a_record_is_batched_or_dead_lettered() -> None:
    """Unusable records become dead letters, with the reason and in order, and are listed in the current batch."""
    bench = Bench([3, BAD, 3, BAD, 3])
    first, last = bench.batches()
    assert first.records == (bench.records[0], bench.records[2])
    assert first.dead_lettered == (DeadLetteredRecord(RecordId(ONE, 1), Reason.EMPTY, "made to fail"),)
    assert (last.records, last.dead_lettered) == (
        (bench.records[4],),
        (DeadLetteredRecord(RecordId(ONE, 3), Reason.EMPTY, "made to fail"),),
    )
    assert bench.sink.flushed == [DeadLetter(bench.records[offset], Reason.EMPTY, "made to fail") for offset in (1, 3)]


def test_dead_letters_are_not_sent_again_after_a_restart() -> None:
    """The same records fail again, and each still has one dead letter."""
    before = Bench([BAD, 3, BAD, 3])
    wanted = before.batches()
    again = Bench([BAD, 3, BAD, 3, BAD], sink=MemoryDeadLetters(before.sink.flushed))
    first, last = again.batches()
    assert [first.dead_lettered] == [batch.dead_lettered for batch in wanted]
    assert [dead_lettered.id.offset for dead_lettered in last.dead_lettered] == [4]
    assert again.dead_lettered_offsets() == [0, 2, 4]


def test_a_given_up_record_is_not_decoded() -> None:
    """Records given up for a reason become dead letters with that reason, without being decoded."""
    bench = Bench([3, 3, 3], given_up={RecordId(ONE, 1): (Reason.NOT_FINITE_UPDATE, "refused before")})
    (batch,) = bench.batches()
    assert batch.records == (bench.records[0], bench.records[2])
    assert batch.dead_lettered == (DeadLetteredRecord(RecordId(ONE, 1), Reason.NOT_FINITE_UPDATE, "refused before"),)
    assert [(sent.record.offset, sent.reason) for sent in bench.sink.flushed] == [(1, Reason.NOT_FINITE_UPDATE)]
    assert RecordId(ONE, 1) not in bench.decoder.decoded


def test_one_poll_may_fill_several_batches() -> None:
    """Each call returns one batch; the source is polled again after the last of them."""
    bench = Bench([1] * 5)
    assert [len(batch.records) for batch in bench.batches()] == [2, 2, 1]


def test_no_batch_until_it_is_full() -> None:
    """Only a flush closes a partly filled one, and only the caller flushes."""
    bench = Bench([3])
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.flush_due is FlushReason.END
    assert bench.intake.open_runs == runs_of([bench.records[0].id])
    (batch,) = bench.intake.flush()
    assert batch.records == tuple(bench.records)
    assert bench.intake.open_runs == ()
    assert bench.intake.flush() == []


def test_a_flush_is_due_after_the_linger() -> None:
    """Not while a full batch is ready; again after another quiet time."""
    bench = Bench([3, 3, 3], endless=True)
    assert bench.intake.next_batch(timeout_s=0.0) is not None
    for wait_s, due in ((0.0, None), (9.0, None), (1.0, FlushReason.LINGER)):
        bench.clock.now += wait_s
        assert bench.intake.next_batch(timeout_s=0.0) is None
        assert bench.intake.flush_due is due
    (batch,) = bench.intake.flush()
    assert batch.records == (bench.records[2],)
    assert bench.intake.flush_due is None
    bench.source.append(*records_of([3] * 6)[3:])
    bench.clock.now += 60.0
    assert bench.intake.next_batch(timeout_s=0.0) is not None
    assert bench.intake.flush_due is None
    bench.intake.next_batch(timeout_s=0.0)
    bench.clock.now += 10.0
    assert bench.intake.flush_due is FlushReason.LINGER
    bench.intake.postpone_flush()
    assert bench.intake.flush_due is None


def test_a_journalled_flush_is_repeated_without_waiting() -> None:
    """At the same record, although more have arrived since; the next batches are formed from those after it."""
    records = records_of([3] * 6)
    plan: list[PartitionRun | Mark] = [*runs_of([record.id for record in records[:3]]), Mark.FLUSH]
    bench = Bench([3] * 6, endless=True, journalled=plan)
    first = bench.intake.next_batch(timeout_s=0.0)
    assert first is not None
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.flush_due is FlushReason.JOURNAL
    (second,) = bench.intake.flush()
    third = bench.intake.next_batch(timeout_s=0.0)
    assert third is not None
    assert [batch.records for batch in (first, second, third)] == [
        tuple(records[:2]),
        (records[2],),
        tuple(records[3:5]),
    ]
    assert bench.intake.flush_due is None


def test_records_that_must_be_read_again_are_waited_for() -> None:
    """They are in the log: a broker that takes long to return them is not a quiet stream."""
    records = records_of([3] * 3)
    bench = Bench([3], endless=True, journalled=runs_of([record.id for record in records]))
    for _ in range(3):
        assert bench.intake.next_batch(timeout_s=0.0) is None
        bench.clock.now += 60.0
        assert bench.intake.flush_due is None
    bench.source.append(*records[1:])
    assert bench.intake.next_batch(timeout_s=0.0) is not None
    bench.intake.next_batch(timeout_s=0.0)
    bench.clock.now += 10.0
    assert bench.intake.flush_due is FlushReason.LINGER


def test_a_journalled_record_that_is_gone_holds_up_no_flush() -> None:
    """Compaction removed one of four: the other three are a batch and a flushed rest, as soon as the last has come."""
    records = records_of([3] * 5)
    plan: list[PartitionRun | Mark] = [PartitionRun("t", 1, 0, 5, 4), Mark.FLUSH]
    bench = Bench([], endless=True, journalled=plan)
    bench.source.append(*(record for record in records if record.offset not in (1, 3)))
    first = bench.intake.next_batch(timeout_s=0.0)
    assert first is not None
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.flush_due is FlushReason.JOURNAL
    (second,) = bench.intake.flush()
    assert [[record.offset for record in batch.records] for batch in (first, second)] == [[0, 2], [4]]


def test_a_segment_of_unusable_records_makes_batches_without_examples() -> None:
    """The position advances by MAX_DEAD_LETTERED records per batch, each with its dead letter."""
    bench = Bench([BAD] * (MAX_DEAD_LETTERED + 50))
    full = None
    while full is None:
        full = bench.intake.next_batch(timeout_s=0.0)
    assert (len(full.dead_lettered), full.examples) == (MAX_DEAD_LETTERED, ())
    (rest,) = bench.batches()
    assert len(rest.dead_lettered) == 50
    assert bench.dead_lettered_offsets() == list(range(MAX_DEAD_LETTERED + 50))


class FullSink(MemoryDeadLetters):
    """Accepts nothing."""

    def send(self, dead_letter: DeadLetter) -> None:
        raise DeadLetterError("the disk is full")


def test_a_dead_letter_that_cannot_be_sent_stops_the_stream() -> None:
    """Going on would lose the record, so the error is raised."""
    bench = Bench([3, BAD, 3], sink=FullSink())
    with pytest.raises(DeadLetterError, match="the disk is full"):
        bench.intake.next_batch(timeout_s=0.0)


def test_a_payload_is_never_logged() -> None:
    """The log names the record's offset and the reason, not its content."""
    record = Record(ONE, 5, b"private words", key=b"private key", headers=(("name", b"private header"),))
    with capture_logs() as events:
        DeadLetterWriter(MemoryDeadLetters()).send(record, Reason.NOT_JSON, "not JSON")
    (event,) = events
    assert event["event"] == Event.RECORD_DEAD_LETTERED
    assert (event["origin"], event["offset"], event["reason"]) == ("t-1", 5, Reason.NOT_JSON)
    assert "private" not in repr(event)
