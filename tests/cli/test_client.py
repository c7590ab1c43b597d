"""The token is sent to the daemon and nowhere else; a response or certificate that is not the daemon's is named."""

import http.server
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamlearn.cli import status
from streamlearn.cli.client import daemon_url, request
from streamlearn.cli.controls import request_control
from streamlearn.controls import Control
from streamlearn.errors import ConfigError, SourceError, UsageError
from streamlearn.http.guards import obtain_token
from streamlearn.settings import Settings
from streamlearn.snapshot.files import StateLock
from tests.cli.conftest import Answering, whole
from tests.serve.doubles import SETTINGS, TOKEN, Daemon


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


class Certificates:
    """A root, an intermediate and two leaves that name no address, and two that signed themselves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        root = self._make("root")
        intermediate = self._make("intermediate", signer=root)
        self.leaf = self._make("leaf", signer=intermediate)
        self.other_leaf = self._make("other-leaf", signer=intermediate)
        self.self_signed = self._make("self-signed")
        self.other_self_signed = self._make("other-self-signed")
        self.with_intermediate = self._chain("fullchain.pem", self.leaf, intermediate)
        self.with_root = self._chain("rootchain.pem", self.leaf, intermediate, root)

    def _make(self, name: str, *, signer: tuple[Path, Path] | None = None) -> tuple[Path, Path]:
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        signed = [] if signer is None else ["-CA", str(signer[0]), "-CAkey", str(signer[1])]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        named = ["-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={name}"]
        subprocess.run(["openssl", "req", "-x509", *curve, *named, *signed], check=True, capture_output=True)
        return certificate, key

    def _chain(self, name: str, *links: tuple[Path, Path]) -> tuple[Path, Path]:
        chain = self._folder / name
        chain.write_text("".join(certificate.read_text() for certificate, _ in links))
        return chain, links[0][1]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return Certificates(tmp_path_factory.mktemp("tls"))


Make = Callable[..., Settings]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Settings of a daemon with a certificate and a token."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)

    def build(pair: tuple[Path, Path], port: int, host: str = "127.0.0.1") -> Settings:
        serve = {"host": host, "port": port, "token_file": token, "require_token": True}
        tls = {"tls_certfile": pair[0], "tls_keyfile": pair[1]}
        source = {"jsonl": {"path": tmp_path / "stream.jsonl"}}
        return Settings.model_validate({"state": tmp_path, "source": source, "serve": {**serve, **tls}})

    return build


@contextmanager
def daemon(pair: tuple[Path, Path] | None, host: str = "127.0.0.1") -> Iterator[int]:
    """A daemon that serves with this certificate; its port."""
    tls: dict[str, Any] = {} if pair is None else {"tls_certfile": pair[0], "tls_keyfile": pair[1]}
    running = Daemon(SETTINGS.model_copy(update={"host": host, "require_token": True, **tls}))
    try:
        yield running.server.port
    finally:
        running.stop()


@pytest.mark.parametrize("name", ["self_signed", "leaf", "with_root"])
def test_the_daemons_own_certificate_is_trusted(certificates: Certificates, make: Make, name: str) -> None:
    """Self-signed or not, with all of its chain or a part; it need not name the address."""
    pair = getattr(certificates, name)
    with daemon(pair) as port:
        assert b'"phase"' in request(make(pair, port), "/v1/status")
        with pytest.raises(httpx2.TransportError):  # plain HTTP gets no response
            httpx2.get(f"http://127.0.0.1:{port}/livez", timeout=2.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 - what is tested
def test_a_daemon_on_all_addresses_is_asked_on_the_loopback(certificates: Certificates, make: Make, host: str) -> None:
    """No certificate names the address that stands for all."""
    if ":" in host and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with daemon(certificates.with_intermediate, host) as port:
        settings = make(certificates.with_intermediate, port, host)
        assert daemon_url(settings) == f"https://{'[::1]' if ':' in host else '127.0.0.1'}:{port}"
        assert b'"phase"' in request(settings, "/v1/status")


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ("other_self_signed", "self_signed"),
        ("other_leaf", "with_root"),
    ],
)
def test_another_certificate_is_refused(certificates: Certificates, make: Make, served: str, expected: str) -> None:
    """Also one of the same authority, whose certificate is in the file; the message says what to do."""
    pair = getattr(certificates, expected)
    words = r"first certificate in serve\.tls_certfile .*restart the daemon"
    with daemon(getattr(certificates, served)) as port, pytest.raises(UsageError, match=words) as refused:
        request(make(pair, port), "/v1/status")
    assert str(pair[0]) in str(refused.value)


def test_a_daemon_without_tls_is_named(certificates: Certificates, make: Make) -> None:
    """It was started with another configuration."""
    with daemon(None) as port, pytest.raises(UsageError, match=r"serve\.tls_certfile .*restart the daemon"):
        request(make(certificates.leaf, port), "/v1/status")


def test_a_daemon_that_ends_during_the_handshake_is_away(
    certificates: Certificates, make: Make, answering: Answering
) -> None:
    """As one that does not answer at all."""
    with pytest.raises(SourceError, match="no daemon answers"):
        request(make(certificates.leaf, answering(b"")), "/v1/status")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_read_is_named(make: Make, tmp_path: Path, content: str | None) -> None:
    """Exit 78: the configuration is wrong."""
    chain = tmp_path / "chain.pem"
    if content is not None:
        chain.write_text(content)
    with pytest.raises(ConfigError, match=r"serve\.tls_certfile .*chain\.pem: expected a PEM certificate chain"):
        request(make((chain, tmp_path / "key.pem"), 9), "/v1/status")
