"""Opening of the configured connectors."""

from collections.abc import Iterator
from pathlib import Path

from connectors.dead_letters import FileDeadLetters, StoredDeadLetter
from connectors.jsonl import JsonlSource, read_file
from connectors.kafka.dead_letters import KafkaDeadLetterLog, KafkaDeadLetters
from connectors.kafka.source import KafkaSource
from connectors.kafka.topic_replayer import KafkaTarget, TopicReplayer
from connectors.replay import JsonlTarget, LedgerReplayer, Replayer, ReplayLedger
from streamlearn.settings import Settings, SourceSettings
from streamlearn.stream.source import DeadLetters, Source


def open_source(settings: SourceSettings, *, start_timeout_s: float = 60.0) -> Source:
    """Return the configured source.

    It connects at `seek`, which waits for an unreachable broker for at most `start_timeout_s`.
    """
    if settings.kafka is not None:
        return KafkaSource(settings.kafka, start_timeout_s=start_timeout_s)
    assert settings.jsonl is not None, "the settings name exactly one source"
    return JsonlSource(settings.jsonl)


def open_dead_letters(settings: Settings, *, start_timeout_s: float = 60.0) -> DeadLetters:
    """Open the configured topic or file, by default `dead_letters.jsonl` in the state folder.

    A topic waits for an unreachable broker for at most `start_timeout_s`.

    Raises:
        DeadLetterError: it cannot be opened.
    """
    if settings.dead_letters.topic is not None:
        assert settings.source.kafka is not None, "the settings refuse a topic without a cluster"
        kafka, topic = settings.source.kafka, settings.dead_letters.topic
        return KafkaDeadLetters(kafka, topic, start_timeout_s=start_timeout_s)
    return FileDeadLetters(_file(settings))


def read_dead_letters(settings: Settings) -> Iterator[StoredDeadLetter]:
    """Yield every dead letter in the configured topic or file; safe beside a running daemon.

    Raises:
        DeadLetterError: they cannot be read.
        SourceError: the cluster cannot be used.
    """
    if settings.dead_letters.topic is None:
        yield from read_file(_file(settings))
        return
    assert settings.source.kafka is not None, "the settings refuse a topic without a cluster"
    log = KafkaDeadLetterLog(settings.source.kafka, settings.dead_letters.topic)
    try:
        yield from log.read()
    finally:
        log.close()


def open_replayer(settings: Settings) -> Replayer:
    """Open what puts dead letters back into the configured source.

    Raises:
        UsageError: the source does not allow it.
        DeadLetterError: another process replays, or what became of an earlier replay cannot be known.
        SourceError: the cluster cannot be used.
    """
    kafka = settings.source.kafka
    if settings.dead_letters.topic is not None:
        assert kafka is not None, "the settings refuse a topic without a cluster"
        return TopicReplayer(kafka, settings.dead_letters.topic)
    ledger = ReplayLedger(settings.state / "replayed.jsonl")
    try:
        if kafka is not None:
            return LedgerReplayer(ledger, KafkaTarget(kafka, kafka.group_id))
        assert settings.source.jsonl is not None, "the settings name exactly one source"
        return LedgerReplayer(ledger, JsonlTarget(settings.source.jsonl.path))
    except BaseException:
        ledger.close()
        raise


def _file(settings: Settings) -> Path:
    assert settings.dead_letter_file is not None, "no topic is set"
    return settings.dead_letter_file
