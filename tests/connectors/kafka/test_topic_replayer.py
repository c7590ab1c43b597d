"""Dead letters are put back into their topics once each, wherever the process is killed, against a real broker."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.dead_letters import Repair, StoredDeadLetter
from connectors.kafka.dead_letters import REPLAY_OF, KafkaDeadLetterLog, KafkaDeadLetters
from connectors.kafka.topic_replayer import KafkaTarget, TopicReplayer
from connectors.replay import LedgerReplayer, ReplayLedger
from streamlearn.errors import DeadLetterError, Reason, UsageError
from streamlearn.stream.record import Record, TopicPartition
from streamlearn.stream.source import DeadLetter
from tests.broker import Broker

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("leaked_sockets")]

KILLED = """
import os, signal, sys
from connectors.kafka.topic_replayer import TopicReplayer
from connectors.stored_dead_letter import Repair
from tests.connectors.kafka.test_topic_replayer import stored
from streamlearn.settings import KafkaSettings
servers, topic, dead, moment = sys.argv[1:]
settings = KafkaSettings(bootstrap_servers=servers, topics=(topic,), security_protocol="PLAINTEXT")
replayer = TopicReplayer(settings, dead)
replayer.put_back([Repair(each, each.record.value) for each in stored(settings, dead)[:2]])
producer = replayer._target._producer
end = lambda: os.kill(os.getpid(), signal.SIGKILL)
if moment == "before":
    producer.commit_transaction = end
else:
    commit = producer.commit_transaction
    producer.commit_transaction = lambda: (commit(), end())
replayer.put_back([Repair(each, each.record.value) for each in stored(settings, dead)[2:4]])
"""


def set_aside(broker: Broker, topic: str, dead: str, number: int = 5) -> None:
    """Write dead letters of both partitions of `topic`."""
    sink = KafkaDeadLetters(broker.settings(topic), dead)
    for offset in range(number):
        record = Record(
            TopicPartition(topic, offset % 2), offset, b'{"text": "%d"}' % offset, b"k", (("h", b"1"),), 1_000 + offset
        )
        sink.send(DeadLetter(record, Reason.BAD_FORM, "no"))
    sink.flush()
    sink.close()


def stored(settings: object, dead: str) -> list[StoredDeadLetter]:
    """The dead letters of a topic, by offset of their records."""
    log = KafkaDeadLetterLog(settings, dead)  # type: ignore[arg-type]
    try:
        return sorted(log.read(), key=lambda each: each.record.offset)
    finally:
        log.close()


def put_back(broker: Broker, topic: str, dead: str) -> int:
    """Put back all that were not; return their number."""
    settings = broker.settings(topic)
    replayer = TopicReplayer(settings, dead)
    try:
        missing = [each for each in stored(settings, dead) if each.id not in replayer.replayed()]
        if missing:
            replayer.put_back([Repair(each, each.record.value or b"") for each in missing])
        return len(missing)
    finally:
        replayer.close()


def committed(broker: Broker, topic: str) -> list[bytes]:
    """The values that a reader of committed messages gets."""
    from kafka import KafkaConsumer  # noqa: PLC0415

    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=broker.servers,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level="read_committed",
        consumer_timeout_ms=3_000,
    )
    try:
        return sorted(message.value for message in consumer)
    finally:
        consumer.close()


def test_each_is_put_back_once_where_it_came_from(broker: Broker) -> None:
    """With its key, its headers and a header that names it; the daemon's own reader of dead letters is not confused."""
    topic, dead = broker.new_topic(partitions=2), broker.new_topic()
    set_aside(broker, topic, dead)
    assert put_back(broker, topic, dead) == 5
    assert put_back(broker, topic, dead) == 0
    messages = broker.read_all(topic)
    assert sorted(message.value for message in messages) == [b'{"text": "%d"}' % offset for offset in range(5)]
    assert {(message.partition, message.value[-3:-2]) for message in messages} == {
        (offset % 2, b"%d" % offset) for offset in range(5)
    }
    assert {message.key for message in messages} == {b"k"}
    assert all(dict(message.headers).keys() == {"h", REPLAY_OF} for message in messages)
    sink = KafkaDeadLetters(broker.settings(topic), dead)
    assert len(sink.recall(None)) == 5
    sink.close()


@pytest.mark.parametrize(("moment", "left"), [("before", 3), ("after", 1)])
def test_a_kill_around_the_commit_neither_loses_nor_repeats_one(moment: str, left: int, broker: Broker) -> None:
    """With SIGKILL, in a process of its own."""
    topic, dead = broker.new_topic(partitions=2), broker.new_topic()
    set_aside(broker, topic, dead)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, broker.servers, topic, dead, moment],
        cwd=Path(__file__).parents[3],
        env=os.environ,
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert put_back(broker, topic, dead) == left
    assert committed(broker, topic) == [b'{"text": "%d"}' % offset for offset in range(5)]


def test_a_second_replay_takes_over(broker: Broker) -> None:
    """The first one, which still runs, puts back nothing more."""
    topic, dead = broker.new_topic(partitions=2), broker.new_topic()
    set_aside(broker, topic, dead)
    settings = broker.settings(topic)
    first = TopicReplayer(settings, dead)
    assert put_back(broker, topic, dead) == 5
    with pytest.raises(DeadLetterError):
        first.put_back([Repair(each, each.record.value or b"") for each in stored(settings, dead)])
    first.close()
    assert len(committed(broker, topic)) == 5


def test_a_ledger_asks_the_topic_what_was_committed(broker: Broker, tmp_path: Path) -> None:
    """For dead letters in a file: after a kill right after the commit, and one right before."""
    topic = broker.new_topic(partitions=2)
    settings = broker.settings(topic)
    letters = [
        StoredDeadLetter(Record(TopicPartition(topic, 0), offset, b"%d" % offset, timestamp_ms=1), "x", "y", "z")
        for offset in range(2)
    ]
    repairs = [Repair(each, each.record.value or b"") for each in letters]
    for repair, arrives in zip(repairs, (True, False), strict=True):
        ledger, target = ReplayLedger(tmp_path / "replayed.jsonl"), KafkaTarget(settings, "ledger")
        LedgerReplayer(ledger, target)
        ledger.begin([repair.dead_letter.id], target.plan([repair]))
        if arrives:
            target.put([repair])
        target.close()
        ledger.close()
    ledger = ReplayLedger(tmp_path / "replayed.jsonl")
    replayer = LedgerReplayer(ledger, KafkaTarget(settings, "ledger"))
    assert replayer.replayed() == {letters[0].id}
    replayer.put_back(repairs[1:])
    replayer.close()
    assert committed(broker, topic) == [b"0", b"1"]


def test_a_source_that_reads_uncommitted_records_is_refused(broker: Broker) -> None:
    settings = broker.settings("any", isolation_level="read_uncommitted")
    with pytest.raises(UsageError, match="Set read_committed"):
        KafkaTarget(settings, "x")
