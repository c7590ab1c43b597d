"""Opening of the configured connectors; Kafka's modules are imported where a configuration names it."""

from collections.abc import Iterator
from pathlib import Path

from connectors.dead_letters import FileDeadLetters, read_file
from connectors.jsonl import JsonlSource
from streamlearn.settings import Settings, SourceSettings
from streamlearn.stream.source import DeadLetter, DeadLetters, Source


def open_source(settings: SourceSettings, *, start_timeout_s: float = 60.0) -> Source:
    """Return the configured source.

    It connects at `seek`, which waits for an unreachable broker for at most `start_timeout_s`.
    """
    if settings.kafka is not None:
        from connectors.kafka.source import KafkaSource  # noqa: PLC0415 - see above

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
        from connectors.kafka.dead_letters import KafkaDeadLetters  # noqa: PLC0415 - see above

        assert settings.source.kafka is not None, "the settings refuse a topic without a cluster"
        kafka, topic = settings.source.kafka, settings.dead_letters.topic
        return KafkaDeadLetters(kafka, topic, start_timeout_s=start_timeout_s)
    return FileDeadLetters(_file(settings))


def read_dead_letters(settings: Settings) -> Iterator[DeadLetter]:
    """Yield every dead letter in the configured topic or file; safe while a daemon is running.

    Raises:
        DeadLetterError: they cannot be read.
        SourceError: the cluster cannot be used.
    """
    if settings.dead_letters.topic is None:
        return read_file(_file(settings))
    from connectors.kafka.dead_letters import read_topic  # noqa: PLC0415 - see above

    assert settings.source.kafka is not None, "the settings refuse a topic without a cluster"
    return read_topic(settings.source.kafka, settings.dead_letters.topic)


def _file(settings: Settings) -> Path:
    assert settings.dead_letter_file is not None, "no topic is set"
    return settings.dead_letter_file
