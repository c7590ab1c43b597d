"""The token is sent to the daemon and nowhere else, and an answer that is none of its own is named."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamlearn.cli import status
from streamlearn.cli.client import request
from streamlearn.cli.controls import request_control
from streamlearn.controls import Control
from streamlearn.errors import SourceError, UsageError
from streamlearn.http.guards import obtain_token
from streamlearn.settings import Settings
from streamlearn.snapshot.lock import StateLock
from tests.cli.conftest import Answering, whole


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Redirects GET /moved and records every path that was requested."""

    requested: list[str]

    def do_GET(self) -> None:
        """Answer any path."""
        self.requested.append(self.path)
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("Location", "/stolen")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    Elsewhere.requested = []
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield listening
    listening.shutdown()
    thread.join()
    listening.server_close()


def settings(tmp_path: Path, port: int) -> Settings:
    stream = {"jsonl": {"path": tmp_path / "stream.jsonl"}}
    return Settings.model_validate({"state": tmp_path, "source": stream, "serve": {"port": port}})


def test_a_redirect_is_not_followed(server: http.server.ThreadingHTTPServer, tmp_path: Path) -> None:
    """It is reported as a refusal; the token never reaches the target."""
    with pytest.raises(UsageError, match="answered 302"):
        request(settings(tmp_path, server.server_port), "/moved")
    assert Elsewhere.requested == ["/moved"]


def test_no_proxy_is_used(
    server: http.server.ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes straight to the daemon, whatever proxy the environment names."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert request(settings(tmp_path, server.server_port), "/v1/status") == b"ok"
    assert Elsewhere.requested == ["/v1/status"]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n{",
    ],
)
def test_a_daemon_that_ends_while_it_answers_is_away(tmp_path: Path, answering: Answering, answer: bytes) -> None:
    """Wherever the answer breaks off."""
    with pytest.raises(SourceError, match=r"no daemon answers \(.+\): start it$"):
        request(settings(tmp_path, answering(answer)), "/v1/status")


def test_a_refusal_is_no_absence(tmp_path: Path, answering: Answering) -> None:
    """What is not in the daemon's format is quoted."""
    port = answering(whole(b"<html>", "502 Bad Gateway"))
    with pytest.raises(UsageError, match="answered 502: <html>"):
        request(settings(tmp_path, port), "/v1/status")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"<html>", "no JSON: unexpected character"),
        (b"[]", r"StatusView: Input should be"),
        (b'{"phase": "running"}', r"StatusView\.[a-z_]+: Field required"),
    ],
)
def test_what_is_no_daemon_of_this_release_is_named(
    tmp_path: Path, answering: Answering, answer: bytes, reason: str
) -> None:
    """By `status`, which prints JSON of any release, and `regimes list`."""
    answered = settings(tmp_path, answering(whole(answer)))
    with pytest.raises(UsageError, match=rf"answers, but not as this release's daemon does \({reason}"):
        status.tables(status.fetch(answered))
    with pytest.raises(UsageError, match="answers, but not as this release's daemon does"):
        status.regimes_table(status.fetch(answered, "regimes")["regimes"])


def test_a_control_names_a_daemon_of_another_release(tmp_path: Path, answering: Answering) -> None:
    """It holds the state folder, so a daemon it is."""
    answered = settings(tmp_path, answering(whole(b"{}")))
    obtain_token(answered)
    with StateLock(tmp_path), pytest.raises(UsageError, match=r"^the daemon answers, but not as .*ControlResult"):
        request_control(answered, Control.run("pause"))
