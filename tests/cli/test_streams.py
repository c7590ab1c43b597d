"""Standard streams that are full, closed or gone, and failures as events."""

import os
import subprocess
import sys
import threading
import warnings
from logging import StreamHandler, getLogger
from pathlib import Path

import orjson
import pytest

from streamlearn.cli.streams import failures_as_events
from streamlearn.errors import SnapshotError
from streamlearn.events import Event, configure_logging, get_logger
from tests.end_to_end.test_process import small_daemon

COMMAND = f"{sys.executable} -m streamlearn"


def shell(line: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of a shell; `$SL` is the command."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "SL": COMMAND, **environment},
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("$SL --help | head -1", 0),
        ("$SL schema | head -1 >&2", 0),
        ("$SL --version 2>&-", 0),
        ("$SL --version >&- 2>&- <&-", 0),
        ("$SL schema > /dev/full", 74),
        ("$SL nothing 2> /dev/full", 64),
        ("$SL check-config --config none.yaml 2>&-", 78),
    ],
)
def test_output_that_cannot_be_written_ends_no_command(line: str, code: int) -> None:
    """Where it is the result, and its reader did not just stop reading, one line says so."""
    ended = shell(line)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    if code == 74:
        assert ended.stderr == "streamlearn: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("columns", ["0", "1", "-1", "wide", ""])
def test_a_width_that_nothing_fits_is_ignored(columns: str) -> None:
    said = shell("$SL --help", COLUMNS=columns, TERMINAL_WIDTH=columns, LINES="0")
    assert "Usage: " in said.stdout
    refused = shell("$SL check-config --config none.yaml", COLUMNS=columns)
    assert (refused.returncode, "none.yaml" in refused.stderr) == (78, True)


@pytest.mark.parametrize("redirection", ["> /dev/full 2> /dev/full", ">&- 2>&-", "2>&1 | head -1"])
def test_a_run_ends_as_if_all_was_written(tmp_path: Path, redirection: str) -> None:
    """It has learned everything."""
    daemon = small_daemon(tmp_path, serve={"enabled": False})
    ended = shell(f"$SL run --config {daemon.config} {redirection}")
    assert ended.returncode == 0, ended.stderr
    assert daemon.newest().manifest["step"] == daemon.journalled_step() > 0


def test_every_line_of_a_failed_run_is_json(tmp_path: Path) -> None:
    """The reason why it ended too."""
    daemon = small_daemon(tmp_path, serve={"enabled": False})
    (daemon.state / "lock").mkdir(parents=True)
    ended = shell(f"$SL run --config {daemon.config}")
    lines = [orjson.loads(line) for line in ended.stderr.splitlines()]
    last = lines[-1]
    assert (last["event"], last["error"], last["exit_code"]) == ("daemon_failed", "SnapshotError", ended.returncode)
    assert "lock: must be writable" in last["message"]
    assert lines[0]["versions"].keys() >= {"streamlearn", "torch"}


def test_threads_libraries_and_warnings_write_no_text_between_the_events(
    capsys: pytest.CaptureFixture[str],
) -> None:
    library, printed = getLogger("tests.library"), StreamHandler()
    library.addHandler(printed)
    library.propagate = False

    def die() -> None:
        raise ValueError("in a thread")

    def fail() -> None:
        with (
            warnings.catch_warnings(action="default"),
            failures_as_events(get_logger("test"), Event.DAEMON_FAILED, as_json=configure_logging("info", "json")),
        ):
            thread = threading.Thread(target=die, name="worker")
            thread.start()
            thread.join()
            library.warning("from a library")
            warnings.warn("deprecated", FutureWarning, stacklevel=1)
            raise SnapshotError("no room")

    with pytest.raises(SnapshotError) as ended:
        fail()
    lines = [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["thread_failed", "library_logged", "library_logged", "daemon_failed"]
    assert lines[0]["exception"][0]["exc_value"] == "in a thread"
    assert (lines[-1]["message"], lines[-1]["exit_code"], ended.value.is_logged) == ("no room", 74, True)
