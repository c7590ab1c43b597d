"""`streamlearn feed`: cluster, checks and rate. Sending is tested with a broker in end_to_end."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from connectors.columns import Records
from connectors.rows import open_file
from streamlearn.cli.feed import Pacer, Portion, RecordCheck, check_all, cluster_of, open_records
from streamlearn.cli.main import app
from streamlearn.errors import SourceError, UsageError
from tests.connectors.kafka.doubles import SteppingClock
from tests.connectors.row_files import write_csv, write_jsonl, write_parquet
from tests.vision import as_base64, make_image


def write(folder: Path, source: str) -> Path:
    config = folder / "config.yaml"
    config.write_text(f"source: {source}\n")
    return config


def test_the_cluster_is_that_of_the_configuration(tmp_path: Path) -> None:
    config = write(
        tmp_path, "{kafka: {bootstrap.servers: 'localhost:9092', topics: [t], security.protocol: PLAINTEXT}}"
    )
    assert cluster_of(config, None).bootstrap_servers == "localhost:9092"


def test_a_local_broker_needs_no_configuration() -> None:
    cluster = cluster_of(None, "127.0.0.1:9092")
    assert (cluster.bootstrap_servers, cluster.security_protocol) == ("127.0.0.1:9092", "PLAINTEXT")


def test_a_broker_on_another_machine_needs_a_configuration() -> None:
    """The message says so; it is not a traceback of pydantic."""
    with pytest.raises(UsageError, match=r"brokers on this machine.*found broker\.example:9092; use --config"):
        cluster_of(None, "broker.example:9092")


def test_exactly_one_cluster_is_required(tmp_path: Path) -> None:
    config = write(tmp_path, "{jsonl: {path: a.jsonl}}")
    with pytest.raises(UsageError, match="add --config FILE or --bootstrap-servers HOST:PORT"):
        cluster_of(None, None)
    with pytest.raises(UsageError, match=r"has no source\.kafka"):
        cluster_of(config, None)
    assert cluster_of(config, "localhost:9092").bootstrap_servers == "localhost:9092"
    kafka = write(tmp_path, "{kafka: {bootstrap.servers: 'localhost:9092', topics: [t], security.protocol: PLAINTEXT}}")
    with pytest.raises(UsageError, match="keep one"):
        cluster_of(kafka, "localhost:9092")


GOOD: list[Any] = [
    {"text": "a b"},
    {"prompt": "p", "completion": "c", "meta": {"task": 1}},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
    {"prompt": "<image>?", "completion": "c", "image": as_base64(make_image())},
    {"text": "word " * 400_000},
]
BAD: list[tuple[Any, str]] = [
    ({"promt": "p", "completion": "c"}, "bad_form"),
    ({"text": 1}, "bad_type"),
    ({"messages": [{"role": "nobody", "content": "hi"}]}, "bad_form"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "nothing_to_learn"),
    ({"prompt": "<image><image>", "completion": "c", "image": as_base64(make_image())}, "bad_form"),
    ({"prompt": "p", "completion": "c", "image": "https://example.org/a.png"}, "bad_image"),
    ([1], "bad_form"),
]


@pytest.fixture(scope="module")
def check() -> RecordCheck:
    """That of a feed without a configuration."""
    return RecordCheck(None)


def test_rows_that_the_daemon_would_refuse_are_counted_by_reason(check: RecordCheck, tmp_path: Path) -> None:
    """Without a configuration sizes are not: the daemon may allow them."""
    path = write_jsonl(tmp_path / "rows.jsonl", [*GOOD, *(record for record, _ in BAD)])
    records = open_records(open_file(path), {}, skip_bad_rows=True, check=check)
    assert [json.loads(record.value) for record in records] == GOOD
    reasons = [reason for _, reason in BAD]
    assert records.refused == {reason: reasons.count(reason) for reason in reasons}
    assert f"{path} line {len(GOOD) + 1}: 'promt'" in records.first_refused["bad_form"]


def test_a_bad_row_stops_before_anything_is_sent(check: RecordCheck, tmp_path: Path) -> None:
    """Unless it lies outside of what is to be sent."""
    path = write_jsonl(tmp_path / "rows.jsonl", [BAD[0][0], *GOOD[:3], BAD[1][0]])

    def opened(skip: int) -> Records:
        records = open_records(open_file(path), {}, check=check)
        records.num_trusted = skip
        return records

    with pytest.raises(SourceError, match=r"line 1: .*did you mean prompt.* leave such rows out with --skip-bad-rows"):
        check_all(opened(0), Portion())
    with pytest.raises(SourceError, match="line 5: text must be a string, found a number"):
        check_all(opened(1), Portion(skip=1))
    assert check_all(opened(1), Portion(skip=1, records=3)) == 3


def test_the_configuration_decides_what_is_refused(tmp_path: Path) -> None:
    """Its limits, and its backbone, which reads only text here."""
    config = tmp_path / "config.yaml"
    config.write_text("source: {jsonl: {path: a.jsonl}}\nstream: {max_tokens: 8, overlong: dead_letter}\n")
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "short"}, {"text": "long " * 20}, GOOD[3]])
    records = open_records(open_file(path), {}, skip_bad_rows=True, check=RecordCheck(config))
    assert len(list(records)) == 1
    assert records.refused == {"too_many_tokens": 1, "bad_form": 1}
    config.write_text("source: {jsonl: {path: a.jsonl}}\nstream: {max_tokens: 8}\n")
    check = RecordCheck(config)
    assert len(list(open_records(open_file(path), {}, skip_bad_rows=True, check=check))) == 2
    assert "; 1 would be cut to stream.max_tokens and lose " in check.scope


def test_the_mapping_of_the_configuration_is_that_of_the_daemon(tmp_path: Path) -> None:
    """Lines and rows are sent as they stand; a deletion is no bad row."""
    config = tmp_path / "config.yaml"
    config.write_text("source: {jsonl: {path: a.jsonl}}\nrecords: {unwrap: [after, .], prompt: q, completion: a}\n")
    check = RecordCheck(config)
    lines: list[Any] = [
        {"q": "why?", "a": "so", "id": 1},
        {"before": {"q": "x"}, "after": None, "op": "d"},
        {"q": "why?"},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", lines)
    records = open_records(open_file(path), {}, skip_bad_rows=True, check=check)
    assert [json.loads(record.value) for record in records] == lines[:2]
    assert records.refused == {"bad_form": 1}
    assert check.scope.endswith("; 1 would be ignored, such as deletions")
    rows = open_records(open_file(write_parquet(tmp_path / "rows.parquet", lines[:1])), {}, check=check)
    assert [json.loads(record.value) for record in rows] == [{"q": "why?", "a": "so", "id": 1}]


KTO: list[dict[str, Any]] = [
    {"prompt": "2+2=", "completion": "4", "label": True},
    {"prompt": "2+2=", "completion": "5", "label": False},
]


@pytest.mark.filterwarnings(  # `datasets` leaves a CSV file open
    "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    ("write_rows", "name"), [(write_csv, "rows.csv"), (write_parquet, "rows.parquet"), (write_jsonl, "rows.jsonl")]
)
@pytest.mark.parametrize("fields", [{}, {"prompt": "prompt", "completion": "completion"}])
def test_a_bad_answer_of_a_table_stays_one(
    write_rows: Callable[[Path, list[Any]], Path], name: str, fields: dict[str, str], tmp_path: Path
) -> None:
    """The column `label` goes with its row; without a configuration and with one that ignores bad answers."""
    path = write_rows(tmp_path / name, KTO)
    records = open_records(open_file(path), fields, skip_bad_rows=True, check=RecordCheck(None))
    assert [json.loads(record.value)["completion"] for record in records] == ["4"]
    assert records.refused == {"label_false": 1}
    config = tmp_path / "config.yaml"
    config.write_text("source: {jsonl: {path: a.jsonl}}\nrecords: {label_false: ignore}\n")
    check = RecordCheck(config)
    values = [json.loads(record.value) for record in open_records(open_file(path), fields, check=check)]
    assert [str(value["label"]) for value in values] == ["True", "False"]
    assert "1 would be ignored" in check.scope


@pytest.mark.parametrize(
    "row", [{"text": "It rains.", "label": False}, {"prompt": "Rain?", "completion": "Yes.", "label": 3}]
)
def test_a_label_that_is_none_of_ktos_is_left_out(row: dict[str, Any], tmp_path: Path) -> None:
    """A text's class, or a number; `sample_type` goes with its row."""
    path = write_parquet(tmp_path / "rows.parquet", [{**row, "sample_type": "news"}])
    records = open_records(open_file(path), {}, check=RecordCheck(None))
    expected = {name: value for name, value in row.items() if name != "label"} | {"sample_type": "news"}
    assert [json.loads(record.value) for record in records] == [expected]


def test_a_backbone_that_is_elsewhere_is_named(tmp_path: Path) -> None:
    """Everything but tokens and lengths is checked all the same."""
    config = tmp_path / "config.yaml"
    model = f"backbone: {{model: owner/name, revision: '{'0' * 40}'}}"
    config.write_text(f"source: {{jsonl: {{path: a.jsonl}}}}\n{model}\nstream: {{max_record_bytes: 100}}\n")
    check = RecordCheck(config)
    assert "owner/name is not on this machine" in check.scope
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "word " * 40}, BAD[0][0]])
    records = open_records(open_file(path), {}, skip_bad_rows=True, check=check)
    assert len(list(records)) == 1
    assert records.refused == {"too_large": 1, "bad_form": 1}


def test_a_dry_run_says_what_would_become_of_every_row(tmp_path: Path) -> None:
    """By reason; it fails as the feed itself would."""
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD[0], BAD[0][0], BAD[1][0], GOOD[1]])
    command = ["feed", str(path), "--topic", "t", "--dry-run"]
    result = CliRunner().invoke(app, command)
    assert "2 records would be sent; 2 bad rows left out (1 bad_form, 1 bad_type)" in result.stdout
    assert f"first bad_type: {path} line 3: text must be a string, found a number" in result.stdout
    assert isinstance(result.exception, SourceError)
    assert "2 rows would be refused" in str(result.exception)
    assert CliRunner().invoke(app, [*command, "--skip-bad-rows"]).exit_code == 0
    unchecked = CliRunner().invoke(app, [*command, "--no-check"])
    assert "4 records would be sent; 0 bad rows left out" in unchecked.stdout


def test_the_standard_input_is_read() -> None:
    """By its own name, and by that of its device."""
    lines = "".join(f'{{"text": "record {number}"}}\n' for number in range(3000)).encode()
    for name in ("-", "/dev/stdin"):
        command = [sys.executable, "-m", "streamlearn", "feed", name, "--topic", "t", "--dry-run", "--no-check"]
        result = subprocess.run(
            command, input=lines, capture_output=True, check=True, env={**os.environ, "COLUMNS": "200"}
        )
        assert b"3000 records would be sent" in result.stdout
        assert f'{name} line 1: {{"text":"record 0"}}'.replace(':"', ': "').encode() in result.stdout


def due_times(rate: float | None, number: int, pause_after: int = -1, pause_s: float = 0.0) -> list[float]:
    clock = SteppingClock()
    pacer = Pacer(rate, threading.Event(), clock=clock, wait=clock.sleep)
    times = []
    for index in range(number):
        assert pacer.wait()
        times.append(round(clock.now, 6))
        clock.now += pause_s if index == pause_after else 0.0
    return times


def test_records_are_due_at_equal_distances() -> None:
    """The first at once."""
    assert due_times(4.0, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_short_delay_is_caught_up_with() -> None:
    assert due_times(4.0, 6, pause_after=1, pause_s=0.6) == [0.0, 0.25, 0.85, 0.85, 1.0, 1.25]


def test_no_burst_follows_a_long_delay() -> None:
    """The schedule starts over."""
    assert due_times(4.0, 5, pause_after=1, pause_s=60.0) == [0.0, 0.25, 60.25, 60.5, 60.75]


def test_without_a_rate_nothing_waits() -> None:
    assert due_times(None, 3) == [0.0, 0.0, 0.0]


def test_a_stop_ends_the_wait() -> None:
    """Also one that is under way."""
    stop = threading.Event()
    pacer = Pacer(0.001, stop)
    assert pacer.wait()
    threading.Timer(0.05, stop.set).start()
    assert not pacer.wait()
    assert not Pacer(None, stop).wait()
