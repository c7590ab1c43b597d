"""The format of responses and errors."""

import asyncio

import orjson
import pytest

from streamlearn.http.guards import ApiError, FaultShield, OrjsonResponse, internal_error, unavailable
from streamlearn.jobs.results import SnapshotResult
from streamlearn.status import Timing


@pytest.mark.parametrize(
    ("content", "body"),
    [
        ({"a": [1, None]}, b'{"a":[1,null]}\n'),
        ({"a": float("nan"), "b": float("inf")}, b'{"a":null,"b":null}\n'),
        (SnapshotResult(name="a", step=1), b'{"name":"a","step":1}\n'),
        (Timing(counts=(1,), total_s=0.5, last_s=0.5), b'{"counts":[1],"total_s":0.5,"last_s":0.5}\n'),
    ],
)
def test_values_models_and_dataclasses_become_json(content: object, body: bytes) -> None:
    assert OrjsonResponse(content).body == body


def test_an_error_has_code_message_hint_and_headers() -> None:
    response = ApiError(
        418, "teapot", "expected coffee, found tea", hint="use another pot", headers={"a": "b"}
    ).response()
    assert response.status_code == 418
    assert orjson.loads(bytes(response.body)) == {
        "error": {"code": "teapot", "message": "expected coffee, found tea", "hint": "use another pot"}
    }
    assert response.headers["a"] == "b"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/a@1", "/v1/completions", "/v1/chat/completions"])
def test_an_error_on_the_paths_of_openai_has_the_form_of_openai(path: str) -> None:
    """Its clients show the message and branch on the code."""
    error = ApiError(404, "model_not_found", "expected a known model", hint="GET /v1/models lists them", param="model")
    assert orjson.loads(bytes(error.response(path).body)) == {
        "error": {
            "message": "expected a known model; GET /v1/models lists them",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_unavailable_is_503_with_retry_after() -> None:
    error = unavailable("queue_full", "full", hint="retry", retry_after_s=7)
    assert (error.status, error.headers) == (503, {"retry-after": "7"})


def test_the_shield_replaces_an_unexpected_exception() -> None:
    """The client gets the internal error and no detail of the exception."""
    sent: list[dict[str, object]] = []

    async def broken(*_: object) -> None:
        raise RuntimeError("secret")

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(FaultShield(broken)({"type": "http", "path": "/"}, None, send))  # type: ignore[arg-type]
    assert [message.get("status") for message in sent] == [500, None]
    assert sent[1]["body"] == internal_error().response().body
