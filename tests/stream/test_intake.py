"""What becomes of each record between the source and the batch."""

from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest
from structlog.testing import capture_logs

from connectors.memory import MemoryDeadLetters, MemorySource
from streamlearn.errors import DeadLetterError, Reason
from streamlearn.events import Event
from streamlearn.settings import StreamSettings
from streamlearn.stream.batch import MAX_REJECTED, Batch, Batcher, Rejected
from streamlearn.stream.intake import DeadLetterWriter, GivenUp, Intake
from streamlearn.stream.merge import Merger
from streamlearn.stream.record import Record, RecordId
from streamlearn.stream.source import DeadLetter
from tests.stream.test_batch import BAD, ONE, LengthDecoder, records_of

SETTINGS = StreamSettings(batch_records=2, batch_tokens=20, max_tokens=20)


class Bench:
    """An intake with its source and its sink in reach."""

    ahead = False
    """Whether it decodes ahead; `both_ways` sets it."""

    def __init__(
        self,
        lengths: list[int],
        *,
        sink: MemoryDeadLetters | None = None,
        given_up: GivenUp = MappingProxyType({}),
    ) -> None:
        self.records = records_of(lengths)
        self.source = MemorySource(self.records)
        self.sink = sink or MemoryDeadLetters()
        self.decoder = LengthDecoder()
        self.intake = Intake(
            Merger(self.source),
            self.decoder,
            Batcher(SETTINGS),
            DeadLetterWriter(self.sink, self.sink.recall(None)),
            max_records=100,
            given_up=given_up,
            ahead=ThreadPoolExecutor(1) if self.ahead else None,
        )

    def batches(self) -> list[Batch]:
        """Everything to the end of the source; letters are durable then."""
        batches = []
        while (batch := self.intake.next_batch(timeout_s=0.0)) is not None:
            batches.append(batch)
        assert self.source.exhausted
        batches += self.intake.last_batches()
        self.sink.flush()
        return batches

    def letters(self) -> list[int]:
        return [letter.record.offset for letter in self.sink.letters]


@pytest.fixture(autouse=True, params=["when asked", "ahead"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded ahead or not, the outcome is one."""
    monkeypatch.setattr(Bench, "ahead", request.param == "ahead")


def test_a_record_is_trained_or_set_aside() -> None:
    """Unusable records become dead letters, with the reason and in order; the batch being filled accounts for them."""
    bench = Bench([3, BAD, 3, BAD, 3])
    first, last = bench.batches()
    assert first.records == (bench.records[0], bench.records[2])
    assert first.rejected == (Rejected(RecordId(ONE, 1), Reason.EMPTY),)
    assert (last.records, last.rejected) == ((bench.records[4],), (Rejected(RecordId(ONE, 3), Reason.EMPTY),))
    assert bench.sink.letters == [DeadLetter(bench.records[offset], Reason.EMPTY, "made to fail") for offset in (1, 3)]


def test_letters_of_a_life_before_are_not_sent_again() -> None:
    """After a restart the same records are rejected again, and each has one letter all the same."""
    before = Bench([BAD, 3, BAD, 3])
    wanted = before.batches()
    again = Bench([BAD, 3, BAD, 3, BAD], sink=MemoryDeadLetters(before.sink.letters))
    first, last = again.batches()
    assert [first.rejected] == [batch.rejected for batch in wanted]
    assert [rejected.id.offset for rejected in last.rejected] == [4]
    assert again.letters() == [0, 2, 4]


def test_a_record_that_was_given_up_is_set_aside_unread() -> None:
    """Records that are named with a reason become dead letters for that reason and are not decoded."""
    bench = Bench([3, 3, 3], given_up={RecordId(ONE, 1): (Reason.NOT_FINITE_UPDATE, "refused before")})
    (batch,) = bench.batches()
    assert batch.records == (bench.records[0], bench.records[2])
    assert batch.rejected == (Rejected(RecordId(ONE, 1), Reason.NOT_FINITE_UPDATE),)
    assert [(letter.record.offset, letter.reason) for letter in bench.sink.letters] == [(1, Reason.NOT_FINITE_UPDATE)]
    assert RecordId(ONE, 1) not in bench.decoder.asked


def test_one_poll_may_fill_several_batches() -> None:
    """Batches wait their turn: one a call, the source is asked again behind the last."""
    bench = Bench([1] * 5)
    assert [len(batch.records) for batch in bench.batches()] == [2, 2, 1]


def test_no_batch_until_it_is_full() -> None:
    """Time alone closes nothing: a batch that lacks a record stays open until the source ends."""
    bench = Bench([3])
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.next_batch(timeout_s=0.0) is None
    (batch,) = bench.intake.last_batches()
    assert batch.records == tuple(bench.records)
    assert bench.intake.last_batches() == []


def test_a_stretch_of_rubbish_makes_batches_without_examples() -> None:
    """The position moves on through it: MAX_REJECTED records a batch, each with its letter."""
    bench = Bench([BAD] * (MAX_REJECTED + 50))
    full = None
    while full is None:
        full = bench.intake.next_batch(timeout_s=0.0)
    assert (len(full.rejected), full.examples) == (MAX_REJECTED, ())
    (rest,) = bench.batches()
    assert len(rest.rejected) == 50
    assert bench.letters() == list(range(MAX_REJECTED + 50))


class FullSink(MemoryDeadLetters):
    """Takes nothing."""

    def send(self, letter: DeadLetter) -> None:
        raise DeadLetterError("the disk is full")


def test_a_letter_that_cannot_be_sent_stops_the_stream() -> None:
    """Going on would lose the record, so the error goes up."""
    bench = Bench([3, BAD, 3], sink=FullSink())
    with pytest.raises(DeadLetterError, match="the disk is full"):
        bench.intake.next_batch(timeout_s=0.0)


def test_a_payload_is_never_logged() -> None:
    """The log names where the record stood and why it was set aside, not what it held."""
    record = Record(ONE, 5, b"private words", key=b"private key", headers=(("name", b"private header"),))
    with capture_logs() as events:
        DeadLetterWriter(MemoryDeadLetters()).send(record, Reason.NOT_JSON, "not JSON")
    (event,) = events
    assert event["event"] == Event.RECORD_DEAD_LETTERED
    assert (event["origin"], event["offset"], event["reason"]) == ("t-1", 5, Reason.NOT_JSON)
    assert "private" not in repr(event)
