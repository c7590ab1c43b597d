"""What is known about a server, from its polls."""

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from structlog.testing import capture_logs

from streamlearn.gateway.upstreams import MAX_LATE_POLLS, Upstream

MODELS = (200, b'{"data": [{"id": "nano"}]}')


class ScriptedUpstream(Upstream):
    """Its polls have these results, in order."""

    def __init__(self, *results: tuple[int, bytes] | Exception) -> None:
        super().__init__("http://127.0.0.1:1", timeout_s=1.0)
        self._results: Iterator[tuple[int, bytes] | Exception] = iter(results)

    async def _list_models(self) -> tuple[int, bytes]:
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result


def poll(upstream: Upstream, times: int = 1) -> None:
    async def run() -> None:
        for _ in range(times):
            await upstream.poll()

    asyncio.run(run())


@pytest.mark.parametrize(
    "failure",
    [
        aiohttp.ClientConnectionError("refused"),
        (500, b"{}"),
        (200, b"<html>"),
        (200, b'{"data": 1}'),
        (200, b"[]"),
    ],
    ids=repr,
)
def test_a_server_that_fails_a_poll_serves_nothing_until_the_next(failure: tuple[int, bytes] | Exception) -> None:
    """Its loss and its return are one event each."""
    upstream = ScriptedUpstream(MODELS, failure, failure, MODELS)
    with capture_logs() as events:
        poll(upstream)
        assert upstream.models == {"nano"}
        poll(upstream, 2)
        assert (upstream.models, upstream.is_reachable) == (frozenset(), False)
        poll(upstream)
        assert (upstream.models, upstream.is_reachable) == (frozenset({"nano"}), True)
    assert [each["event"] for each in events] == ["upstream_reachable", "upstream_unreachable", "upstream_reachable"]


def test_a_busy_server_is_not_given_up_for_one_late_poll() -> None:
    """Only for several in a row."""
    late = [TimeoutError()] * MAX_LATE_POLLS
    upstream = ScriptedUpstream(MODELS, *late[1:], MODELS, *late)
    poll(upstream, MAX_LATE_POLLS)
    assert upstream.models == {"nano"}
    poll(upstream, MAX_LATE_POLLS)
    assert upstream.models == {"nano"}
    poll(upstream)
    assert not upstream.models
