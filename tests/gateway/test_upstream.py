"""What is known about a server, from its polls."""

import asyncio
from collections.abc import Iterator

import httpx2
import pytest
from structlog.testing import capture_logs

from streamlearn.gateway.upstreams import Upstream

MODELS = httpx2.Response(200, json={"data": [{"id": "nano"}]})


def polled(upstream: Upstream) -> frozenset[str]:
    asyncio.run(upstream.poll())
    return upstream.models


@pytest.mark.parametrize(
    "failure",
    [
        httpx2.ConnectError("refused"),
        httpx2.ReadTimeout("late"),
        httpx2.Response(500, content=b"{}"),
        httpx2.Response(200, content=b"<html>"),
        httpx2.Response(200, content=b'{"data": 1}'),
        httpx2.Response(200, content=b"[]"),
    ],
    ids=repr,
)
def test_a_server_that_fails_a_poll_serves_nothing_until_the_next(
    failure: httpx2.Response | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss and its return are one event each."""
    results: Iterator[httpx2.Response | Exception] = iter((MODELS, failure, failure, MODELS))

    async def get(*_: object, **__: object) -> httpx2.Response:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    upstream = Upstream("http://127.0.0.1:1", timeout_s=1.0)
    monkeypatch.setattr(upstream._client, "get", get)
    with capture_logs() as events:
        assert [polled(upstream) for _ in range(4)] == [{"nano"}, set(), set(), {"nano"}]
    assert [event["event"] for event in events] == ["upstream_reachable", "upstream_unreachable", "upstream_reachable"]
