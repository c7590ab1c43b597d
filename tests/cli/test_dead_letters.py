"""`streamlearn dead-letters` over a file: list, show, export, mend, replay."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from connectors.dead_letters import FileDeadLetters
from streamlearn.cli.main import app
from streamlearn.errors import Reason, UsageError
from streamlearn.stream.record import Record, TopicPartition
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
    """Run one of the commands and return what it printed."""
    result = CliRunner(env={"COLUMNS": "120"}).invoke(
        app, ["dead-letters", *arguments, "--config", str(config)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def lines(config: Path) -> list[bytes]:
    return (config.parent / "records.jsonl").read_bytes().splitlines()


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


def test_mended_records_are_put_back_once(config: Path) -> None:
    """A record that is one is exported as an object, another as text; the file is its owner's only."""
    file = config.parent / "export.jsonl"
    call(config, "export", str(file), "--topic", "records.jsonl")
    assert file.stat().st_mode & 0o777 == 0o600
    entries: list[dict[str, Any]] = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert [type(entry["value"]) for entry in entries] == [dict, str, dict]
    with pytest.raises(UsageError, match=r"line 2 would be a dead letter again \(not_json\)"):
        call(config, "replay", "--from", str(file))
    assert len(lines(config)) == 1  # all or none are checked before
    entries[0]["value"]["prompt"] = entries[0]["value"].pop("promt")
    entries[1]["value"] = '{"text": "mended"}'
    file.write_bytes(b"".join(orjson.dumps(entry) + b"\n" for entry in entries[:2]))
    assert "2 would be put back" in call(config, "replay", "--from", str(file), "--dry-run")
    assert len(lines(config)) == 1
    assert "2 put back, 0 had been before" in call(config, "replay", "--from", str(file))
    put_back = lines(config)[1:]
    assert orjson.loads(put_back[0]) == {"prompt": PRIVATE, "completion": "b"}
    assert put_back[1] == b'{"text": "mended"}'
    assert "0 put back, 2 had been before" in call(config, "replay", "--from", str(file))
    assert lines(config)[1:] == put_back
    assert "2 put back" in call(config, "replay", "--from", str(file), "--again")


def test_records_are_put_back_as_they_are(config: Path) -> None:
    """Except those that would be refused again, and those of other streams."""
    output = call(config, "replay", "--all")
    assert "2 put back, 0 had been before" in output
    assert "1 left: records of topics that this configuration does not read" in output
    assert "1 left: would be dead letters again (not_json)" in output
    assert "0 put back, 1 had been before" in call(config, "replay", "records.jsonl:0:9")
    assert lines(config)[-1] == b'{"text": "big"}'


def test_what_has_no_content_is_listed_and_not_put_back(config: Path) -> None:
    """The dead-letter topic was too small for it. A value that somebody has filled in is put back."""
    prefix = "__streamlearn.errors."
    place = {"topic": "records.jsonl", "partition": "0", "offset": "12", "timestamp": "0", "left.out.bytes": "3145740"}
    headers = {prefix + name: value for name, value in place.items()} | {f"{prefix}exception.message": "too long"}
    sink = config.parent / "state" / "dead_letters.jsonl"
    sink.write_bytes(orjson.dumps({"headers": headers, "record_headers": [], "key": None, "value": None}) + b"\n")
    (row,) = map(orjson.loads, call(config, "list", "--json").splitlines())
    assert (row["value_bytes"], row["left_out"]) == (3145740, True)
    assert "content left out; too long" in " ".join(call(config, "list").split())
    output = call(config, "replay", "--all")
    assert "0 put back" in output
    assert "1 left: without content, which was too large for the dead-letter topic" in output
    file = config.parent / "export.jsonl"
    call(config, "export", str(file))
    entry = orjson.loads(file.read_bytes())
    assert (entry["value"], entry["left_out_bytes"]) == (None, 3145740)
    with pytest.raises(UsageError, match=r"line 1 would be a dead letter again \(empty\)"):
        call(config, "replay", "--from", str(file))
    assert len(lines(config)) == 1
    file.write_bytes(orjson.dumps(entry | {"value": {"text": "shorter"}}) + b"\n")
    assert "1 put back" in call(config, "replay", "--from", str(file))
    assert lines(config)[-1] == b'{"text":"shorter"}'


def test_a_replay_needs_one_selection(config: Path) -> None:
    for arguments in ((), ("--all", "--reason", "empty"), ("--all", "--from", str(config))):
        with pytest.raises(UsageError, match="expected one of --from FILE, --all, and records or filters"):
            call(config, "replay", *arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 77}, "which is not among the dead letters"),
        ({"timestamp": "x"}, "must be one that `dead-letters export` wrote"),
        ({"value": None}, r"would be a dead letter again \(empty\)"),
        ({"value": [1]}, r"would be a dead letter again \(bad_form\)"),
    ],
)
def test_a_line_that_mends_nothing_is_refused(change: dict[str, Any], message: str, config: Path) -> None:
    """Before anything is put back."""
    file = config.parent / "export.jsonl"
    call(config, "export", str(file), "--reason", "not_finite_update")
    entry = orjson.loads(file.read_bytes())
    file.write_bytes(orjson.dumps(entry | change) + b"\n")
    with pytest.raises(UsageError, match=message):
        call(config, "replay", "--from", str(file))
    file.write_bytes(2 * (orjson.dumps(entry) + b"\n"))
    with pytest.raises(UsageError, match="line 2 mends the same record as line 1"):
        call(config, "replay", "--from", str(file))
    assert len(lines(config)) == 1


def test_an_export_replaces_no_file(config: Path) -> None:
    with pytest.raises(UsageError, match="must be a new file in an existing folder: File exists"):
        call(config, "export", str(config))
