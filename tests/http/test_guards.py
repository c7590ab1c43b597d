import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from pydantic import ValidationError

from streamlearn.settings import ServeSettings
from tests.serve.doubles import SETTINGS, Daemon

JSON = {"content-type": "application/json"}


def code_of(answer: httpx.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8083", "localhost", "LOCALHOST:1", "[::1]", "[::1]:8083", "localhost:"]
)
def test_loopback_names_are_accepted_with_any_port(client: httpx.Client, host: str) -> None:
    assert client.get("/livez", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8083",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "::1",
        "localhost:x",
        "a@localhost",
        "localhost/",
        "localhost/?",
        "localhost?",
        "localhost#",
        "localhost:1/v1",
        "localhost\\",
        "",
    ],
)
def test_every_other_host_is_refused(client: httpx.Client, host: str) -> None:
    answer = client.get("/livez", headers={"host": host})
    assert answer.status_code == 400
    assert code_of(answer) == "bad_host"


def test_a_request_without_a_host_is_refused(daemon: Daemon) -> None:
    with socket.create_connection(("127.0.0.1", daemon.server.port)) as connection:
        connection.sendall(b"GET /v1/status HTTP/1.0\r\n\r\n")
        assert b" 400 " in connection.recv(100)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "file://",
        "//localhost",
        "localhost",
        "http://localhost/",
        "http://a@localhost",
        "",
    ],
)
def test_foreign_origins_are_refused_on_every_path(client: httpx.Client, origin: str) -> None:
    for path in ("/livez", "/metrics", "/nowhere"):
        answer = client.get(path, headers={"origin": origin})
        assert answer.status_code == 403
        assert code_of(answer) == "foreign_origin"


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:8083", "http://[::1]:1"])
def test_a_page_on_this_machine_is_accepted(client: httpx.Client, origin: str) -> None:
    assert client.get("/livez", headers={"origin": origin}).status_code == 200


@pytest.mark.parametrize("found", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_post_must_be_json(daemon: Daemon, client: httpx.Client, found: str | None) -> None:
    headers = {} if found is None else {"content-type": found}
    for path in ("/v1/eval", "/v1/generate", "/v1/route"):
        answer = client.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 415
        assert code_of(answer) == "wrong_content_type"
    assert len(daemon.jobs) == 0


def test_a_charset_beside_json_is_accepted(client: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/snapshots", headers=headers).status_code == 201


def test_a_client_that_expects_100_continue_is_refused_before_it_sends_the_body(daemon: Daemon) -> None:
    head = "POST /v1/eval HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += "content-length: 20001\r\nexpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", daemon.server.port)) as connection:
        connection.settimeout(0.5)
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_large_body_is_answered_cleanly_whether_or_not_its_length_is_declared(client: httpx.Client) -> None:
    """The client is still sending when the error is certain; it must be able to read the response."""
    pieces = [b" " * 50_000] * 100
    for content in (b"".join(pieces), iter(pieces)):
        answer = client.post("/v1/eval", content=content, headers=JSON)
        assert answer.status_code == 413
        assert code_of(answer) == "body_too_large"
    assert answer.request.headers["transfer-encoding"] == "chunked"


def test_an_endless_body_is_cut_off(client: httpx.Client) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 200_000_000:
            sent += 100_000
            yield b" " * 100_000

    with suppress(httpx.TransportError):  # the response may be lost with the connection
        client.post("/v1/eval", content=endless(), headers=JSON)
    assert sent < 100_000_000
    assert client.get("/livez").status_code == 200


def test_a_body_of_exactly_the_limit_is_read(client: httpx.Client) -> None:
    fitting = b'{"prompt": "a"}'.ljust(SETTINGS.max_body_bytes)
    assert client.post("/v1/generate", content=fitting, headers=JSON).status_code == 200
    assert client.post("/v1/generate", content=iter([fitting[:9], fitting[9:]]), headers=JSON).status_code == 200
    assert client.post("/v1/generate", content=fitting + b" ", headers=JSON).status_code == 413


def test_a_client_that_disconnects_during_the_upload_does_not_affect_others(
    daemon: Daemon, client: httpx.Client
) -> None:
    head = "POST /v1/eval HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", daemon.server.port)) as connection:
        connection.sendall(head.encode())
    assert client.get("/livez").status_code == 200


@pytest.mark.parametrize("host", ["example.com", "Example.COM:8083", "[2001:db8::1]"])
def test_further_names_are_accepted_however_they_are_written(host: str) -> None:
    names = {"port": 0, "names": ["Example.com", "[2001:DB8::1]"]}
    daemon = Daemon(ServeSettings.model_validate(names))
    answer = daemon.client.get("/livez", headers={"host": host})
    daemon.stop()
    assert answer.status_code == 200


@pytest.mark.parametrize("name", ["box:8083", "http://box", "box/", "a@box", "[::1]:8083", ""])
def test_a_name_that_no_host_header_can_match_is_refused(name: str) -> None:
    """A port, which is never compared, among them."""
    with pytest.raises(ValidationError, match="without scheme and port, found"):
        ServeSettings(names=(name,))


def test_the_bound_host_is_allowed_too() -> None:
    daemon = Daemon(SETTINGS.model_copy(update={"host": "127.0.0.2"}))
    answer = httpx.get(f"http://127.0.0.2:{daemon.server.port}/livez")
    daemon.stop()
    assert answer.status_code == 200
