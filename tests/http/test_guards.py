"""Which requests reach a handler, and in which form errors are answered."""

import socket

import httpx2
import orjson
import pytest
from pydantic import ValidationError

from streamlearn.http.responses import ApiError, unavailable
from streamlearn.settings import ServeSettings
from tests.serve.doubles import SETTINGS, Daemon

JSON = {"content-type": "application/json"}


def code_of(answer: httpx2.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code


@pytest.mark.parametrize("host", ["127.0.0.1", "LOCALHOST:1", "[::1]:8083"])
def test_loopback_names_are_accepted_with_any_port(client: httpx2.Client, host: str) -> None:
    assert client.get("/v1/status", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:8083", "localhost.evil.example", "a@localhost", "localhost/?", ""],
)
def test_every_other_host_is_refused_except_by_health_probes(client: httpx2.Client, host: str) -> None:
    """A page that rebinds its own name to 127.0.0.1 still sends that name; a probe sends the address of its pod."""
    assert client.get("/v1/status", headers={"host": host}).status_code == 400
    assert client.get("/livez", headers={"host": host}).status_code == 200


def test_a_request_without_a_host_is_refused(daemon: Daemon) -> None:
    with socket.create_connection(("127.0.0.1", daemon.server.port)) as connection:
        connection.sendall(b"GET /v1/status HTTP/1.0\r\n\r\n")
        assert b" 400 " in connection.recv(100)


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "http://localhost.evil.example",
        "http://a@localhost",
        "http://evil.example/localhost",
    ],
)
def test_foreign_origins_are_refused_on_every_path(client: httpx2.Client, origin: str) -> None:
    for path in ("/livez", "/metrics", "/nowhere"):
        answer = client.get(path, headers={"origin": origin})
        assert (answer.status_code, code_of(answer)) == (403, "foreign_origin")


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://[::1]:1"])
def test_a_page_on_this_machine_is_accepted(client: httpx2.Client, origin: str) -> None:
    assert client.get("/livez", headers={"origin": origin}).status_code == 200


@pytest.mark.parametrize("found", [None, "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_post_must_be_json(daemon: Daemon, client: httpx2.Client, found: str | None) -> None:
    headers = {} if found is None else {"content-type": found}
    for path in ("/v1/eval", "/v1/route"):
        answer = client.post(path, content=b"{}", headers=headers)
        assert (answer.status_code, code_of(answer)) == (415, "wrong_content_type")
    assert len(daemon.jobs) == 0


def test_a_charset_beside_json_is_accepted(client: httpx2.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/snapshots", headers=headers).status_code == 201


def test_a_body_beyond_the_limit_is_refused_whether_or_not_its_length_is_declared(client: httpx2.Client) -> None:
    pieces = [b" " * 50_000] * 10
    for content in (b"".join(pieces), iter(pieces)):
        assert client.post("/v1/eval", content=content, headers=JSON).status_code == 413


@pytest.mark.parametrize("host", ["Example.COM:8083", "[2001:db8::1]"])
def test_further_names_are_accepted_however_they_are_written(host: str) -> None:
    names = {"port": 0, "names": ["Example.com", "[2001:DB8::1]"]}
    daemon = Daemon(ServeSettings.model_validate(names))
    answer = daemon.client.get("/v1/status", headers={"host": host})
    daemon.stop()
    assert answer.status_code == 200


@pytest.mark.parametrize("name", ["box:8083", "http://box", ""])
def test_a_name_that_no_host_header_can_match_is_refused(name: str) -> None:
    """A port, which is never compared, among them."""
    with pytest.raises(ValidationError, match="without scheme and port, found"):
        ServeSettings(names=(name,))


def test_the_bound_host_is_allowed_too() -> None:
    daemon = Daemon(SETTINGS.model_copy(update={"host": "127.0.0.2"}))
    answer = httpx2.get(f"http://127.0.0.2:{daemon.server.port}/livez")
    daemon.stop()
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/nowhere"])
def test_head_has_the_status_and_headers_of_get_and_no_body(client: httpx2.Client, path: str) -> None:
    get, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    for headers in (get.headers, head.headers):
        del headers["date"]
        if path == "/metrics":  # which measures the process at each request
            del headers["content-length"]
    assert head.headers == get.headers


def test_responses_name_no_server_and_are_not_cached(client: httpx2.Client) -> None:
    headers = client.get("/livez").headers
    assert "server" not in headers
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
    assert headers["content-type"] == "application/json"


def test_an_error_has_code_message_hint_and_headers() -> None:
    response = unavailable("queue_full", "expected one, found two", hint="retry", retry_after_s=7).response("/v1/eval")
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    assert orjson.loads(response.body) == {
        "error": {"code": "queue_full", "message": "expected one, found two", "hint": "retry"}
    }


@pytest.mark.parametrize("path", ["/v1/models/a@1", "/v1/chat/completions"])
def test_an_error_on_the_paths_of_openai_has_the_form_of_openai(path: str) -> None:
    """Its clients show the message and branch on the code."""
    error = ApiError(404, "model_not_found", "expected a known model", hint="GET /v1/models lists them", param="model")
    assert orjson.loads(error.response(path).body) == {
        "error": {
            "message": "expected a known model; GET /v1/models lists them",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
