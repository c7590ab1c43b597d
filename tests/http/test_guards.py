"""Which requests reach a handler, and in which form errors are answered."""

import httpx2
import orjson
import pytest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from streamlearn.http.guards import guards
from streamlearn.http.responses import ApiError, unavailable
from streamlearn.settings import ServeSettings
from tests.serve.doubles import Daemon

JSON = {"content-type": "application/json"}


def code_of(answer: httpx2.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code


@pytest.mark.parametrize("host", ["127.0.0.1", "LOCALHOST:1", "[::1]:8083"])
def test_loopback_names_are_accepted_with_any_port_and_json_with_a_charset(client: httpx2.Client, host: str) -> None:
    headers = {"host": host, "origin": "http://[::1]:3000", "content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/snapshots", headers=headers).status_code == 201


@pytest.mark.parametrize(
    "host",
    ["evil.example:8083", "localhost.evil.example", "a@localhost", ""],
)
def test_every_other_host_is_refused_except_by_health_probes(client: httpx2.Client, host: str) -> None:
    """A page that rebinds its own name to 127.0.0.1 still sends that name; a probe sends the address of its pod."""
    assert client.get("/v1/status", headers={"host": host}).status_code == 400
    assert client.get("/livez", headers={"host": host}).status_code == 200


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


@pytest.mark.parametrize("found", [None, "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_post_must_be_json(daemon: Daemon, client: httpx2.Client, found: str | None) -> None:
    headers = {} if found is None else {"content-type": found}
    for path in ("/v1/eval", "/v1/route"):
        answer = client.post(path, content=b"{}", headers=headers)
        assert (answer.status_code, code_of(answer)) == (415, "wrong_content_type")
    assert len(daemon.jobs) == 0


def test_a_body_beyond_the_limit_is_refused_whether_or_not_its_length_is_declared(client: httpx2.Client) -> None:
    pieces = [b" " * 50_000] * 10
    for content in (b"".join(pieces), iter(pieces)):
        assert client.post("/v1/eval", content=content, headers=JSON).status_code == 413


@pytest.mark.parametrize("host", ["Example.COM:8083", "[2001:db8::1]"])
def test_further_names_are_accepted_however_they_are_written(host: str) -> None:
    names = {"port": 0, "names": ["Example.com", "[2001:DB8::1]"]}
    app = Starlette(
        routes=[Route("/it", lambda _: Response())], middleware=guards(ServeSettings.model_validate(names), "")
    )
    with TestClient(app) as client:
        assert client.get("/it", headers={"host": host}).status_code == 200
        assert client.get("/it", headers={"host": "example.org"}).status_code == 400
    with pytest.raises(ValidationError, match="without scheme and port, found"):
        ServeSettings(names=("box:8083",))


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/nowhere"])
def test_head_has_the_status_and_headers_of_get_and_no_body(client: httpx2.Client, path: str) -> None:
    get, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    for headers in (get.headers, head.headers):
        del headers["date"]
        if path == "/metrics":  # which measures the process at each request
            del headers["content-length"]
    assert head.headers == get.headers
    assert "server" not in get.headers
    assert (get.headers["cache-control"], get.headers["x-content-type-options"]) == ("no-store", "nosniff")


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
