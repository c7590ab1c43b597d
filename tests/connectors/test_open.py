"""Opening of the configured connectors."""

from pathlib import Path

from connectors.dead_letters import FileDeadLetters
from connectors.jsonl import JsonlSource
from connectors.kafka.source import KafkaSource
from connectors.open import open_dead_letters, open_source
from streamlearn.settings import DeadLetterSettings, JsonlSettings, KafkaSettings, Settings, SourceSettings

KAFKA = KafkaSettings(bootstrap_servers="127.0.0.1:9092", security_protocol="PLAINTEXT", topics=("events",))


def test_opens_the_configured_source(tmp_path: Path) -> None:
    """Opening neither reads nor connects; `seek` does."""
    jsonl = JsonlSettings(path=tmp_path / "nowhere.jsonl")
    assert isinstance(open_source(SourceSettings(jsonl=jsonl)), JsonlSource)
    assert isinstance(open_source(SourceSettings(kafka=KAFKA)), KafkaSource)


def test_dead_letters_go_to_the_state_folder_by_default(tmp_path: Path) -> None:
    """Without a topic or a file they are stored beside the snapshots."""
    source = SourceSettings(jsonl=JsonlSettings(path=tmp_path / "events.jsonl"))
    sink = open_dead_letters(Settings(source=source, state=tmp_path / "state"))
    assert isinstance(sink, FileDeadLetters)
    assert (tmp_path / "state" / "dead_letters.jsonl").exists()
    sink.close()

    configured = Settings(source=source, dead_letters=DeadLetterSettings(file=tmp_path / "dead.jsonl"))
    open_dead_letters(configured).close()
    assert (tmp_path / "dead.jsonl").exists()
