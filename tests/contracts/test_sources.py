"""The contract of `Source`, tested on every implementation."""

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from connectors.jsonl import JsonlSource
from connectors.kafka.source import KafkaSource
from streamlearn.errors import OffsetGapError
from streamlearn.settings import JsonlSettings
from streamlearn.stream.position import Position, RecordId, TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import Source
from tests.memory import MemorySource, after, records_from

if TYPE_CHECKING:
    from tests.broker import Broker

VALUES = [b'{"text": "%d"}' % number for number in range(23)]

ENDLESS = {"memory, endless", "jsonl, followed", "kafka, three partitions"}

Open = Callable[[], Source]


def drain(source: Source, expected: int = len(VALUES)) -> list[Record]:
    records: list[Record] = []
    while len(records) < expected:
        assert not source.exhausted
        batch = source.poll(max_records=5, timeout_s=10.0)
        assert 0 < len(batch) <= 5
        records += batch
    assert not source.poll(max_records=5, timeout_s=0.1)
    return records


@pytest.fixture(
    params=[
        "memory, two partitions",
        "memory, endless",
        "jsonl",
        "jsonl.gz",
        "jsonl, followed",
        pytest.param("kafka, three partitions", marks=pytest.mark.broker),
    ]
)
def open_source(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Return a function that opens the same 23 records, as a restarted daemon does."""
    kind = request.param
    if kind.startswith("memory"):
        records = split(VALUES, 2) if "two" in kind else records_from(VALUES)
        return lambda: MemorySource(records, endless="endless" in kind)
    if kind.startswith("jsonl"):
        return jsonl(kind, tmp_path)
    broker: Broker = request.getfixturevalue("broker")
    request.getfixturevalue("leaked_sockets")
    topic = broker.new_topic(partitions=3)
    for partition in range(3):
        broker.produce(topic, VALUES[partition::3], partition)
    return lambda: KafkaSource(broker.settings(topic, lag_interval_s=0.1))


def jsonl(kind: str, folder: Path) -> Open:
    path = folder / f"records.{kind.partition(',')[0]}"
    text = b"".join(value + b"\n" for value in VALUES)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    settings = JsonlSettings(path=path, follow="followed" in kind, poll_interval_s=0.01)
    return lambda: JsonlSource(settings)


def split(values: Sequence[bytes], partitions: int) -> list[Record]:
    dealt = [records_from(values[number::partitions], partition=number) for number in range(partitions)]
    return sorted((record for records in dealt for record in records), key=lambda record: record.offset)


def test_returns_every_record_once_in_offset_order(open_source: Open) -> None:
    """Offsets increase within each partition, from those that `seek` returned."""
    source = open_source()
    start = source.seek(Position())
    records = drain(source)
    source.close()

    assert sorted(record.value or b"" for record in records) == sorted(VALUES)
    for origin in {record.origin for record in records}:
        offsets = [record.offset for record in records if record.origin == origin]
        assert offsets == sorted(set(offsets))
        assert offsets[0] == start[origin]


@pytest.mark.parametrize("trained", [1, 11, 23])
def test_resumes_after_the_last_trained_record(open_source: Open, trained: int) -> None:
    """A new source at the trained position returns exactly the rest, whatever was fetched before."""
    first = open_source()
    position = first.seek(Position())
    everything = drain(first)
    first.close()
    position = after(position, everything[:trained])

    second = open_source()
    assert second.seek(position) == position
    rest = drain(second, expected=len(VALUES) - trained)
    second.close()
    assert sorted(rest, key=record_id) == sorted(everything[trained:], key=record_id)


def record_id(record: Record) -> RecordId:
    return record.id


def test_a_second_seek_repeats_the_records(open_source: Open) -> None:
    """A source that was read to its end can be read again."""
    source = open_source()
    source.seek(Position())
    once = drain(source)
    source.seek(Position())
    again = drain(source)
    source.close()
    assert sorted(once, key=record_id) == sorted(again, key=record_id)


def test_tells_how_far_it_has_come(open_source: Open) -> None:
    """Never past a record that is still to come, also after a second seek; after the end it is the end."""
    source = open_source()
    for _ in range(2):
        source.seek(Position())
        ends: dict[TopicPartition, int] = {}
        while sum(ends.values()) < len(VALUES):
            before = source.reached
            for record in source.poll(max_records=5, timeout_s=10.0):
                assert before.get(record.origin, 0) <= record.offset
                ends[record.origin] = record.offset + 1
        source.poll(max_records=5, timeout_s=0.2)
        assert dict(source.reached) == ends
    source.close()


def test_is_empty_after_the_end(open_source: Open, request: pytest.FixtureRequest) -> None:
    """After the last record a poll returns nothing, in time; only a finite source is exhausted."""
    source = open_source()
    source.seek(Position())
    drain(source)
    assert source.poll(max_records=5, timeout_s=0.05) in ([], ())
    endless = request.node.callspec.params["open_source"] in ENDLESS
    assert source.exhausted is not endless
    source.close()


def test_lag_is_the_number_of_records_left(open_source: Open) -> None:
    """All records at the start, none at the end."""
    source = open_source()
    start = source.seek(Position())
    assert sum(source.lag(start).values()) == len(VALUES)
    end = after(start, drain(source))
    assert sum(source.lag(end).values()) == 0
    source.close()


def test_refuses_a_position_past_the_end(open_source: Open) -> None:
    """An offset that the log never reached is an error, which names the offset and what to do."""
    source = open_source()
    origin = next(iter(source.seek(Position())))
    with pytest.raises(OffsetGapError, match=r"99.*--fresh"):
        source.seek(Position({origin: 99}))
    source.close()


def test_accepts_only_its_own_identity(open_source: Open) -> None:
    """A restarted source accepts its previous identity, none, and ids of topics that it no longer reads."""
    first = open_source()
    start = first.seek(Position())
    identity = dict(first.identity)
    first.close()

    second = open_source()
    for remembered in (identity, {}, None, {"no longer read": "7f"}):
        assert second.seek(start, remembered) == start
        assert second.identity == identity
        assert not second.gaps
    if identity:
        with pytest.raises(OffsetGapError, match=r"created again.*--fresh"):
            second.seek(start, dict.fromkeys(identity, "another"))
    second.close()


def test_close_twice_is_safe(open_source: Open) -> None:
    """Also before the source was used."""
    open_source().close()
    source = open_source()
    source.commit(source.seek(Position()), "snapshot-1")  # raises nothing, whatever becomes of it
    source.close()
    source.close()
