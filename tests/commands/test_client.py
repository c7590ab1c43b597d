"""The token is sent to the daemon and nowhere else."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamlearn.commands.client import request
from streamlearn.errors import UsageError
from streamlearn.settings import Settings


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
