"""`streamlearn dead-letters` over a file: list, show, export, and what `feed` makes of the export."""

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from connectors.columns import Records
from connectors.dead_letters import FileDeadLetters
from connectors.rows import JsonlFile
from streamlearn.cli.dead_letters import line_of
from streamlearn.cli.main import app
from streamlearn.errors import Reason, UsageError
from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import DeadLetter

PRIVATE = "private"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A JSONL stream with four dead letters: two broken ones, a refused update, one of another file."""
    (tmp_path / "records.jsonl").write_bytes(b'{"text": "fine"}\n')
    path = tmp_path / "config.yaml"
    path.write_text("source: {jsonl: {path: records.jsonl, follow: true}}\n")
    sink = FileDeadLetters(tmp_path / "state" / "dead_letters.jsonl")
    for topic, offset, value, reason in (
        ("records.jsonl", 3, b'{"promt": "%s", "completion": "b"}' % PRIVATE.encode(), Reason.BAD_FORM),
        ("records.jsonl", 4, b'{"text": ', Reason.NOT_JSON),
        ("records.jsonl", 9, b'{"text": "big"}', Reason.NOT_FINITE_UPDATE),
        ("other.jsonl", 1, b'{"text": "x"}', Reason.BAD_FORM),
    ):
        record = Record(TopicPartition(topic, 0), offset, value, headers=(("trace", PRIVATE.encode()),))
        sink.send(DeadLetter(record, reason, f"why {offset}"))
    sink.flush()
    sink.close()
    return path


def call(config: Path, *arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(
        app, ["dead-letters", *arguments, "--config", str(config)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_list_has_every_record_and_no_content(config: Path) -> None:
    output = call(config, "list")
    assert all(text in output for text in ("records.jsonl:0:3", "not_finite_update", "why 4"))
    assert PRIVATE not in output
    rows = [orjson.loads(line) for line in call(config, "list", "--json").splitlines()]
    assert [row["offset"] for row in rows] == [3, 4, 9, 1]
    assert PRIVATE not in str(rows)


@pytest.mark.parametrize(
    ("filters", "offsets"),
    [
        (("--reason", "bad_form"), [3, 1]),
        (("--reason", "bad_form", "--reason", "not_json"), [3, 4, 1]),
        (("--topic", "other.jsonl"), [1]),
        (("--topic", "records.jsonl", "--partition", "1"), []),
        (("--limit", "2"), [9, 1]),
    ],
)
def test_the_list_is_filtered(filters: tuple[str, ...], offsets: list[int], config: Path) -> None:
    rows = [orjson.loads(line) for line in call(config, "list", "--json", *filters).splitlines()]
    assert [row["offset"] for row in rows] == offsets


def test_an_unknown_reason_is_refused_with_those_that_exist(config: Path) -> None:
    with pytest.raises(UsageError, match=r"--reason bad_from is not known: expected one of empty, "):
        call(config, "list", "--reason", "bad_from")


def test_one_is_shown_with_its_content_only_on_request(config: Path) -> None:
    shown = orjson.loads(call(config, "show", "records.jsonl:0:3"))
    assert (shown["message"], shown["stage"]) == ("why 3", "VALUE_CONVERTER")
    assert shown["headers"] == [{"name": "trace", "bytes": len(PRIVATE)}]
    assert PRIVATE not in str(shown)
    shown = orjson.loads(call(config, "show", "records.jsonl:0:3", "--content"))
    assert PRIVATE in shown["value"]
    assert shown["headers"] == [{"name": "trace", "value": PRIVATE}]
    with pytest.raises(UsageError, match="records:0:3 is not among the dead letters"):
        call(config, "show", "records:0:3")


def test_the_export_is_what_feed_sends(config: Path) -> None:
    """The values as they were, one per line, in the order of the sink; the file is its owner's only."""
    file = config.parent / "export.jsonl"
    output = call(config, "export", str(file), "--topic", "records.jsonl")
    assert "3 records written to" in output
    assert "NOT written" not in output
    values = [b'{"promt": "%s", "completion": "b"}' % PRIVATE.encode(), b'{"text": ', b'{"text": "big"}']
    assert file.read_bytes() == b"".join(value + b"\n" for value in values)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [record.value for record in Records(JsonlFile(file), None)] == values


def test_an_export_that_was_not_corrected_is_not_sent_again(config: Path) -> None:
    """What the daemon would set aside once more is counted by reason, and stops the feed."""
    file = config.parent / "export.jsonl"
    call(config, "export", str(file))
    command = ["feed", str(file), "--topic", "records", "--dry-run", "--config", str(config)]
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, command)
    assert result.exit_code != 0
    assert "2 records would be sent" in result.output
    assert all(text in result.output for text in ("1 bad_form", "1 not_json", "did you mean prompt"))
    assert "2 rows would be refused" in str(result.exception)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (b' {"text": "a"} ', b' {"text": "a"} '),
        ('{"text": "é"}'.encode(), '{"text": "é"}'.encode()),
        (b'{"text": "a", "text": "b"}', b'{"text": "a", "text": "b"}'),
        (b'{\n  "text": "a\\n",\r\n  "meta": 1\n}', b'{   "text": "a\\n",   "meta": 1 }'),
    ],
)
def test_a_line_has_the_bytes_of_the_value(value: bytes, line: bytes) -> None:
    """JSON on several lines is joined: its line breaks stand between tokens, so the record is the same."""
    assert line_of(DeadLetter(Record(TopicPartition("t", 0), 0, value), Reason.BAD_FORM, "")) == line
    if b"\n" in value:
        assert orjson.loads(line) == orjson.loads(value)


def test_what_cannot_be_a_line_is_counted_by_cause(config: Path) -> None:
    """Nothing is left out in silence, and nothing of it is in the file."""
    sink = FileDeadLetters(config.parent / "state" / "dead_letters.jsonl")
    values = [b"\xff\xfe", b'{"text":\n "a', None, b" ", b"\x80"]
    for offset, value in enumerate(values, start=20):
        sink.send(DeadLetter(Record(TopicPartition("records.jsonl", 0), offset, value), Reason.NOT_UTF8, ""))
    sink.flush()
    sink.close()
    file = config.parent / "export.jsonl"
    output = call(config, "export", str(file))
    assert "4 records written to" in output
    assert "2 NOT written: the value is not UTF-8 text" in output
    assert "2 NOT written: the record has no value" in output
    assert "1 NOT written: the value has line breaks and is not JSON" in output
    assert len(file.read_bytes().splitlines()) == 4


def test_a_record_too_large_for_the_topic_is_listed_and_not_exported(config: Path) -> None:
    prefix = "__streamlearn.errors."
    place = {"topic": "records.jsonl", "partition": "0", "offset": "12", "timestamp": "0", "left.out.bytes": "3145740"}
    headers = {prefix + name: value for name, value in place.items()} | {f"{prefix}exception.message": "too long"}
    sink = config.parent / "state" / "dead_letters.jsonl"
    sink.write_bytes(orjson.dumps({"headers": headers, "record_headers": [], "key": None, "value": None}) + b"\n")
    (row,) = map(orjson.loads, call(config, "list", "--json").splitlines())
    assert (row["value_bytes"], row["left_out"]) == (3145740, True)
    assert "content left out; too long" in " ".join(call(config, "list").split())
    output = call(config, "export", str(config.parent / "export.jsonl"))
    assert "1 NOT written: the record was too large for the dead-letter topic" in output


def test_an_export_replaces_no_file(config: Path) -> None:
    with pytest.raises(UsageError, match="must be a new file in an existing folder: File exists"):
        call(config, "export", str(config))
