"""HEAD requests: the status and headers of GET, without a body."""

import socket

import httpx
import pytest

from streamlearn.status import Phase, Status
from tests.serve.doubles import SETTINGS, Daemon

GET_PATHS = (
    "/livez",
    "/readyz",
    "/metrics",
    "/v1/status",
    "/v1/regimes",
    "/v1/shifts",
    "/v1/publication",
    "/v1/snapshots",
)
VARYING = {"date", "content-length"}
"""/metrics measures the process anew at each request."""


def without(headers: httpx.Headers, names: set[str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in names}


@pytest.mark.parametrize("path", [*GET_PATHS, "/", "/openapi.json", "/nowhere"])
def test_head_has_the_status_and_headers_of_get_and_no_body(client: httpx.Client, path: str) -> None:
    get, head = client.get(path), client.head(path)
    assert head.status_code == get.status_code
    assert head.content == b""
    assert without(head.headers, VARYING) == without(get.headers, VARYING)
    assert int(head.headers["content-length"]) > 0
    if path != "/metrics":
        assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_head_reports_a_failed_daemon(daemon: Daemon, client: httpx.Client, path: str) -> None:
    daemon.board.publish(Status(Phase.FAILED))
    head = client.head(path)
    assert (head.status_code, head.headers["retry-after"], head.content) == (503, "5", b"")


def test_nothing_follows_the_headers_on_the_connection(daemon: Daemon) -> None:
    with socket.create_connection(("127.0.0.1", daemon.server.port)) as connection:
        connection.sendall(b"HEAD /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        received = b"".join(iter(lambda: connection.recv(4096), b""))
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.endswith(b"\r\n\r\n")
    assert received.count(b"\r\n\r\n") == 1


def test_head_passes_the_same_guards_as_get() -> None:
    daemon = Daemon(SETTINGS.model_copy(update={"require_token": True}))
    with httpx.Client(base_url=f"http://127.0.0.1:{daemon.server.port}") as anonymous:
        codes = [anonymous.head(path).status_code for path in ("/livez", "/v1/status")]
        foreign = anonymous.head("/livez", headers={"host": "evil.example"}).status_code
    daemon.stop()
    assert codes == [200, 401]
    assert foreign == 400


def test_head_is_not_allowed_where_get_is_not(daemon: Daemon, client: httpx.Client) -> None:
    """And it runs no job."""
    refused = client.head("/v1/eval")
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
    assert client.post("/livez").headers["allow"] == "GET, HEAD"
    assert client.delete("/v1/snapshots").headers["allow"] == "GET, HEAD, POST"
    assert len(daemon.jobs) == 0
