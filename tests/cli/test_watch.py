"""The watch command against a server with a test double for the loop: frames at several sizes, a daemon that goes."""

import io
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from streamlearn.cli.client import Endpoint
from streamlearn.cli.main import app
from streamlearn.cli.watch import REGIMES_EVERY_S, WatchedDaemon, WatchFrame, endpoint_of, watch
from streamlearn.errors import SourceError, UsageError
from streamlearn.history import BackbonePair, History
from tests.cli.conftest import Answering, whole
from tests.history.outcomes import STATUS, history_of, outcome
from tests.serve.doubles import ADAPTATION, RUNNING, Daemon


@pytest.fixture
def history() -> History:
    history = history_of(35)
    history.add_pair(BackbonePair(1, 10, 40.0, 60.0))
    return history


@pytest.fixture
def daemon(daemon: Daemon, history: History) -> Daemon:
    daemon.board.publish(replace(RUNNING, history=history.status))
    return daemon


def endpoint(daemon: Daemon) -> Endpoint:
    return Endpoint(f"http://127.0.0.1:{daemon.server.port}")


class SteppingClock:
    """Seconds set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(watched: WatchedDaemon, *, width: int = 80, height: int = 24, ascii_only: bool = False) -> list[str]:
    """The lines of a frame on a terminal of this size, without colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8")
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
    console.print(WatchFrame(watched))
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    return file.buffer.getvalue().decode(file.encoding).splitlines()


@pytest.fixture
def watched(daemon: Daemon) -> WatchedDaemon:
    watched = WatchedDaemon(endpoint(daemon))
    watched.ask()
    return watched


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 60), (120, 30), (140, 40), (160, 48), (200, 50)])
def test_a_frame_fits_the_terminal(watched: WatchedDaemon, width: int, height: int) -> None:
    """No line is longer or is wrapped, and no section is missing."""
    lines = shown(watched, width=width, height=height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for what in ("streamlearn running", "tokens/s", "lag 7", "snapshot", "AF 0.2500", "BWT -0.1250", "regime  1111"):
        assert what in text
    for what in (
        "forgotten",
        "newest shifts",
        "threshold",
        "dead letters: ",
        "43 requests, 3 unexplained",
    ):
        assert what in text


def test_the_losses_are_told_apart_without_colours(watched: WatchedDaemon) -> None:
    """The model's as dots, the backbone's as marks; the header has both means of the same records."""
    lines = shown(watched)
    assert "sampled: model 4.000, backbone 6.000" in lines[2]
    chart = [line for line in lines if any(0x2800 < ord(each) <= 0x28FF for each in line)]
    assert len(chart) >= 3
    assert any("o" in line[8:] for line in lines[4:9])


def test_a_terminal_without_braille_gets_ascii(watched: WatchedDaemon) -> None:
    """As over a connection whose locale is C."""
    text = "\n".join(shown(watched, ascii_only=True))
    assert text.isascii()
    assert "*" in text


def test_regimes_stand_along_the_stream(watched: WatchedDaemon) -> None:
    """A character each, as long as their records, above the first and the last record."""
    lines = shown(watched, width=148)
    [bar] = [line for line in lines if line.startswith("regime  1")]
    assert [bar.count(each) for each in "1234"] == [40, 40, 40, 20]  # 140 records in 140 columns
    assert lines[lines.index(bar) + 1].split() == ["record", "1", "140"]


def test_shifts_say_what_was_done(watched: WatchedDaemon) -> None:
    """The newest first, with the delay in records."""
    lines = [line.split() for line in shown(watched, height=40)]
    assert ["101", "inputs", "3", "new", "5.5", "3.25", "3", "probed,", "10,240", "tokens"] in lines


def test_dead_letters_are_named_without_their_content(watched: WatchedDaemon) -> None:
    """The newest first: where, why, and the message."""
    lines = shown(watched, height=40)
    at = next(number for number, line in enumerate(lines) if line.startswith("dead letters: "))
    assert lines[at + 1 :] == ["orders:0:35  empty  unusable at 35", "orders:0:28  empty  unusable at 28"]


def test_only_what_changed_is_asked_for(daemon: Daemon, history: History, watched: WatchedDaemon) -> None:
    """Regimes and shifts only now and then, and at once after a shift."""
    clock = SteppingClock()
    watched = WatchedDaemon(endpoint(daemon), clock)
    watched.ask()
    history.add(outcome(36, (4,) * 4), STATUS)
    others = replace(ADAPTATION, average_forgetting=0.75)
    daemon.board.publish(replace(RUNNING, history=history.status, adaptation=others))
    watched.ask()
    assert watched.history.points.step[-2:] == [35, 36]
    assert watched.regimes is not None
    assert watched.regimes.average_forgetting == 0.25
    daemon.board.publish(replace(RUNNING, adaptation=replace(others, num_shifts={"inputs": 3})))
    watched.ask()
    assert watched.regimes.average_forgetting == 0.75
    daemon.board.publish(replace(RUNNING, adaptation=replace(ADAPTATION, num_shifts={"inputs": 3})))
    clock.now = REGIMES_EVERY_S
    watched.ask()
    assert watched.regimes.average_forgetting == 0.25


def test_while_the_daemon_is_away_the_last_answers_stay() -> None:
    """The first line says so; once it is back, so does the frame."""
    clock, daemon = SteppingClock(), Daemon()
    daemon.board.publish(RUNNING)
    watched = WatchedDaemon(endpoint(daemon), clock)
    watched.ask_if_there()
    daemon.stop()
    watched.ask_if_there()
    clock.now = 12.0
    watched.ask_if_there()
    first, second = shown(watched)[:2]
    assert first.startswith("no daemon answers at http://127.0.0.1:")
    assert first.endswith("for 12 s: asking again")
    assert "336 records" in second


@pytest.mark.parametrize("answer", [b"", b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"])
def test_a_daemon_that_is_killed_while_it_answers_is_asked_again(answering: Answering, answer: bytes) -> None:
    """Like one that is away."""
    watched = WatchedDaemon(Endpoint(f"http://127.0.0.1:{answering(answer)}"))
    watched.ask_if_there()
    assert "no daemon answers" in watched.fault


@pytest.mark.parametrize("answer", [b"<html>", b'{"phase": "running"}'])
def test_what_is_no_daemon_of_this_release_ends_it(answering: Answering, answer: bytes) -> None:
    """With a message: asking again would not help."""
    url = f"http://127.0.0.1:{answering(whole(answer))}"
    with pytest.raises(UsageError, match=rf"^{url}/v1/status answers, but not as this release's daemon does"):
        WatchedDaemon(Endpoint(url)).ask_if_there()


def test_before_the_first_record_a_frame_has_no_chart(daemon: Daemon) -> None:
    """While the backbone is loaded."""
    daemon.board.publish(STATUS)
    watched = WatchedDaemon(endpoint(daemon))
    watched.ask()
    assert "no record yet: the series begin with the first batch" in shown(watched)


def test_one_frame_is_printed_and_the_command_ends(daemon: Daemon) -> None:
    """With `--once`, and where the output is no terminal."""
    for options in (["--once"], []):
        result = CliRunner().invoke(app, ["watch", "--url", endpoint(daemon).url, *options])
        assert result.exit_code == 0, result.output
        assert "newest shifts" in result.stdout


def test_without_a_daemon_one_frame_is_an_error() -> None:
    """As for `status`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(SourceError, match="no daemon answers"):
            watch(Endpoint(url), Console(file=io.StringIO()), once=True)


@pytest.mark.parametrize(
    "url", ["localhost:8083", "file:///etc/passwd", "http://", "http://:8083", "http://localhost:http"]
)
def test_a_url_that_is_none_of_a_daemon_is_refused(url: str) -> None:
    """Before anything is asked."""
    with pytest.raises(UsageError, match="--url must be http://HOST:PORT"):
        endpoint_of(None, url)


def test_either_a_configuration_or_a_url_is_needed() -> None:
    """Not both."""
    for config, url in ((None, None), (Path("c.yaml"), "http://localhost:8083")):
        with pytest.raises(UsageError, match="either --config FILE or --url URL"):
            endpoint_of(config, url)


def test_ctrl_c_ends_it_with_the_terminal_as_it_was(daemon: Daemon) -> None:
    """Exit code 0, the alternate screen left and the cursor shown again."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "streamlearn", "watch", "--url", endpoint(daemon).url],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(follower)
    try:
        written = _read_until(leader, b"newest shifts")
        process.send_signal(signal.SIGINT)
        written += _read_until(leader, b"\x1b[?1049l")
        assert process.wait(timeout=30) == 0
        assert b"Traceback" not in written
        assert written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l")
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def _read_until(leader: int, end: bytes) -> bytes:
    found, deadline = b"", time.monotonic() + 120.0  # an import takes seconds, many times that on a busy machine
    while end not in found:
        assert time.monotonic() < deadline, found[-500:]
        found += os.read(leader, 65_536)
    return found
