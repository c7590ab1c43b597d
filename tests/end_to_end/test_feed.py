"""`streamlearn feed` as a process, against a real broker."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from streamlearn.cli.main import app
from streamlearn.errors import SourceError
from tests.broker import Broker
from tests.connectors.row_files import ROWS, write_jsonl, write_parquet

pytestmark = [
    pytest.mark.broker,
    pytest.mark.usefixtures("leaked_sockets"),
    pytest.mark.filterwarnings(  # `datasets` leaves a CSV file that was not read to its end open
        "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
    ),
]

EXPECTED = [{"prompt": row["question"], "completion": row["answer"]} for row in ROWS]
MAPPING = ("--prompt", "question", "--completion", "answer")
FILES: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl.gz": lambda path: gzipped(write_jsonl(path.with_suffix(""))),
    "rows.parquet": write_parquet,
}


def gzipped(path: Path) -> Path:
    subprocess.run(["gzip", path], check=True)
    return path.with_name(path.name + ".gz")


def start(broker: Broker, topic: str, file: Path, *options: str) -> subprocess.Popen[str]:
    """Start the command."""
    command = [sys.executable, "-m", "streamlearn", "feed", str(file), "--topic", topic, *options]
    return subprocess.Popen(
        [*command, "--bootstrap-servers", broker.servers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def feed(broker: Broker, topic: str, file: Path, *options: str) -> str:
    """Run the command in this process and return what it printed."""
    options = (*options, "--bootstrap-servers", broker.servers)
    result = CliRunner().invoke(app, ["feed", str(file), "--topic", topic, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", FILES)
def test_a_file_arrives_in_order(name: str, broker: Broker, tmp_path: Path) -> None:
    """With the same records."""
    topic = broker.new_topic()
    output = feed(broker, topic, FILES[name](tmp_path / name), *MAPPING)
    assert f"600 records sent, 600 acknowledged by {topic} in " in output
    assert [orjson.loads(message.value) for message in broker.read_all(topic)] == EXPECTED


def test_lines_without_a_mapping_are_sent_as_they_stand(broker: Broker, tmp_path: Path) -> None:
    """Broken ones too if nothing is checked: what becomes of them is the daemon's matter."""
    topic = broker.new_topic()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text" : 1}\n\n{broken\n')
    assert "2 records sent, 2 acknowledged" in feed(broker, topic, path, "--no-check")
    assert [message.value for message in broker.read_all(topic)] == [b'{"text" : 1}', b"{broken"]


def test_a_record_that_a_daemon_would_refuse_stops_before_anything_is_sent(broker: Broker, tmp_path: Path) -> None:
    """Or is left out; of a pipe, those before it are sent."""
    topic = broker.new_topic()
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}, {"promt": "b"}, {"text": "c"}])
    with pytest.raises(SourceError, match=r"rows\.jsonl line 2: 'promt'.*did you mean prompt"):
        feed(broker, topic, path)
    assert broker.read_all(topic) == []
    assert "2 acknowledged" in feed(broker, topic, path, "--skip-bad-rows")
    process = start(broker, topic, Path("-"))
    _, errors = process.communicate(path.read_text(), timeout=180)
    assert process.returncode == SourceError.exit_code
    assert "- line 2: 'promt'" in errors
    assert [orjson.loads(message.value)["text"] for message in broker.read_all(topic)] == ["a", "c", "a"]


def test_a_record_up_to_the_topics_own_limit_is_sent(broker: Broker, tmp_path: Path) -> None:
    """Larger than the client's usual limit."""
    topic = broker.new_topic(max_message_bytes="8388608")
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "word " * 300_000}, {"text": "after"}])
    assert "2 records sent, 2 acknowledged" in feed(broker, topic, path)


def test_a_silent_pipe_ends_with_the_first_signal(broker: Broker) -> None:
    topic = broker.new_topic()
    process = start(broker, topic, Path("-"))
    assert process.stdin is not None
    process.stdin.write('{"text": "a"}\n')
    process.stdin.flush()
    deadline = time.monotonic() + 180
    while not broker.read_all(topic):
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=180)
    output, _ = process.communicate()
    assert "1 records sent, 1 acknowledged" in output


def test_a_rate_is_kept_and_a_loop_begins_again(broker: Broker, tmp_path: Path) -> None:
    """Forty records at twenty a second, from a file of three, take two seconds within a fifth."""
    topic = broker.new_topic()
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:3])
    output = feed(broker, topic, path, *MAPPING, "--loop", "--records", "40", "--rate", "20")
    found = re.search(r"40 records sent, 40 acknowledged by \w+ in ([\d.]+) s", output)
    assert found is not None, output
    assert 1.9 <= float(found[1]) <= 2.4
    messages = broker.read_all(topic)
    assert [orjson.loads(message.value) for message in messages] == [EXPECTED[number % 3] for number in range(40)]
    gaps = [b.timestamp - a.timestamp for a, b in pairwise(messages)]
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(50, abs=15)


def test_an_interrupt_waits_for_what_was_sent_and_says_how_to_go_on(broker: Broker, tmp_path: Path) -> None:
    """Both parts together are the file, each record once."""
    topic = broker.new_topic()
    path = write_jsonl(tmp_path / "rows.jsonl")
    process = start(broker, topic, path, *MAPPING, "--rate", "100")
    deadline = time.monotonic() + 180
    while not broker.read_all(topic):
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 130, errors
    found = re.search(r"(\d+) records sent, \1 acknowledged[^\n]*\ninterrupted: continue with --skip \1\n", output)
    assert found is not None, output
    assert 0 < int(found[1]) < 600
    feed(broker, topic, path, *MAPPING, "--skip", found[1])
    assert [orjson.loads(message.value) for message in broker.read_all(topic)] == EXPECTED


def test_an_endless_loop_ends_well_with_an_interrupt(broker: Broker, tmp_path: Path) -> None:
    topic = broker.new_topic()
    process = start(broker, topic, write_jsonl(tmp_path / "rows.jsonl", ROWS[:2]), *MAPPING, "--loop", "--rate", "50")
    deadline = time.monotonic() + 180
    while len(broker.read_all(topic)) < 5:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert f"{len(broker.read_all(topic))} acknowledged" in output


def test_an_unknown_column_sends_nothing(broker: Broker, tmp_path: Path) -> None:
    """And a bad row stops what follows it, unless such rows are left out."""
    topic = broker.new_topic()
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:2], {"question": 1}, *ROWS[2:4]])
    with pytest.raises(SourceError, match=r"did you mean 'question'\?"):
        feed(broker, topic, path, "--prompt", "qestion", "--completion", "answer")
    assert broker.read_all(topic) == []
    with pytest.raises(SourceError, match=r"rows\.jsonl line 3 has no column 'answer'.* with --skip-bad-rows"):
        feed(broker, topic, path, *MAPPING)
    assert "4 acknowledged" in feed(broker, topic, path, *MAPPING, "--skip-bad-rows")
