"""Opening of the configured connectors."""

from connectors.dead_letters import FileDeadLetters
from connectors.jsonl import JsonlSource
from connectors.kafka.dead_letters import KafkaDeadLetters
from connectors.kafka.source import KafkaSource
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


def open_dead_letters(settings: Settings) -> DeadLetters:
    """Open the configured topic or file, by default `dead_letters.jsonl` in the state folder.

    Raises:
        DeadLetterError: it cannot be opened.
    """
    if settings.dead_letters.topic is not None:
        assert settings.source.kafka is not None, "the settings refuse a topic without a cluster"
        return KafkaDeadLetters(settings.source.kafka, settings.dead_letters.topic)
    return FileDeadLetters(settings.dead_letters.file or settings.state / "dead_letters.jsonl")
