"""Servers that refuse, lose their models, die in the middle of an answer, or are slow."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from streamlearn.gateway.upstreams import EventStream, Outcome, Upstream, UpstreamFailedError
from tests.gateway.stub_upstream import SLOW_S, StubUpstream

from .kit import CHAT, TEXT, ask, gateway, is_ready, metric, ready_gateway, wait_until

STREAM = {"model": "nano", "prompt": "a", "stream": True}


@pytest.fixture
def single(published: Path, upstreams: list[StubUpstream]) -> Iterator[httpx2.Client]:
    """A client of a gateway in front of one server."""
    with ready_gateway(published, upstreams[0]) as client:
        yield client


@pytest.mark.parametrize("action", ["refuse", "404", "unloadable", "break"])
def test_a_failure_before_the_answer_is_answered_by_another_server(
    client: httpx2.Client, upstreams: list[StubUpstream], action: str
) -> None:
    """Also one in the middle of an answer that is not streamed: nobody has seen it."""
    upstreams[0].script.append(action)
    while upstreams[0].script:
        assert ask(client, "a", model="nano").status_code == 200
    assert len(upstreams[0].answered) == 1
    assert len(upstreams[1].answered) >= 1


@pytest.mark.parametrize("action", ["404", "500"])
def test_what_every_server_fails_is_503_with_retry_after(
    single: httpx2.Client, upstreams: list[StubUpstream], action: str
) -> None:
    upstreams[0].script.append(action)
    answer = ask(single, "a", model="nano")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "no_upstream"
    assert upstreams[0].url not in answer.text
    assert metric(single, "requests_total", "nano", "unavailable") == 1


def test_a_model_goes_only_to_servers_that_have_it(client: httpx2.Client, upstreams: list[StubUpstream]) -> None:
    upstreams[0].models.discard("streamlearn-regime-1@184-5d3c1f")
    wait_until(lambda: metric(client, "upstream_models") == 7, "the poll")
    for _ in range(5):
        assert ask(client, "a", model="streamlearn-regime-1").status_code == 200
    assert (len(upstreams[0].answered), len(upstreams[1].answered)) == (0, 5)


def test_a_version_that_no_server_has_is_503(client: httpx2.Client, upstreams: list[StubUpstream]) -> None:
    """Never another version, nor the backbone under its name."""
    for upstream in upstreams:
        upstream.models.discard("streamlearn-regime-1@184-5d3c1f")
    wait_until(lambda: metric(client, "upstream_models") == 6, "the poll")
    answer = ask(client, "a", model="streamlearn-regime-1")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert all(not upstream.answered for upstream in upstreams)


def test_servers_that_load_on_demand_need_not_list_a_version(published: Path) -> None:
    """Both are asked, one that was started later too; a version that none can load is 503, and no other answers."""
    versions = {f"streamlearn-regime-{number}@184-5d3c1f" for number in (1, 2)}
    with StubUpstream({"nano"}) as first, StubUpstream({"nano"}) as second:
        second.kill()
        for server in (first, second):
            server.loadable = versions
        with gateway(published, first, second, on_demand=True) as client:
            wait_until(lambda: is_ready(client), "readiness")
            assert ask(client, "a", model="streamlearn-regime-1").json()["model"] == "streamlearn-regime-1@184-5d3c1f"
            second.start()
            first.script.extend(["slow"] * 100)
            with ThreadPoolExecutor(4) as pool:
                while not second.answered:
                    answers = pool.map(
                        lambda _: ask(client, "a", model="streamlearn-regime-2").json()["model"], range(4)
                    )
                    assert set(answers) == {"streamlearn-regime-2@184-5d3c1f"}
            assert ask(client, "a", model="streamlearn-regime-3").status_code == 503
            assert ask(client, "a", model="streamlearn-regime-1@7-5d3c1f").status_code == 404


def test_servers_are_found_by_dns_and_lost_with_their_address(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that cannot be resolved for a while changes nothing."""
    models = {"nano", *(f"streamlearn-regime-{number}@184-5d3c1f" for number in (1, 2, 3))}
    addresses = ["127.0.0.2"]
    resolve = asyncio.BaseEventLoop.getaddrinfo

    async def look_up(loop: asyncio.BaseEventLoop, host: str, port: int, **options: int) -> list[Any]:
        if host != "fleet.test":
            return await resolve(loop, host, port, **options)
        if not addresses:
            raise socket.gaierror("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    with (
        StubUpstream(models, host="127.0.0.2") as first,
        StubUpstream(models, first.port, "127.0.0.3") as second,
        gateway(published, upstream_dns=f"fleet.test:{first.port}") as client,
        capture_logs() as events,
    ):
        wait_until(lambda: is_ready(client), "readiness")
        addresses[:] = ["127.0.0.2", "127.0.0.3"]
        wait_until(lambda: metric(client, "upstream_up") == 2, "the second")
        addresses.clear()
        wait_until(lambda: any("no answer" in str(event) for event in events), "the event")
        assert metric(client, "upstream_up") == 2
        addresses[:] = ["127.0.0.3"]
        wait_until(lambda: metric(client, "upstream_up") == 1, "the loss of the first")
        for _ in range(3):
            assert ask(client, "a", model="nano").status_code == 200
    assert (len(first.answered), len(second.answered)) == (0, 3)


def test_the_least_busy_server_is_asked(client: httpx2.Client, upstreams: list[StubUpstream]) -> None:
    """While one answers slowly, the other gets the requests."""
    slow = upstreams[0]
    slow.script.extend(["slow"] * 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, client, "a", model="nano")
        wait_until(lambda: bool(slow.answered), "the slow request")
        for _ in range(5):
            ask(client, "b", model="nano")
        assert len(upstreams[1].answered) == 5
        assert waiting.result().status_code == 200


def test_a_killed_server_loses_no_request(client: httpx2.Client, upstreams: list[StubUpstream]) -> None:
    """Requests that it was answering are answered by the other; after its return it is used again."""
    killed = upstreams[0]
    killed.script.extend(["slow"] * 1000)
    stop = threading.Event()

    def keep_asking() -> list[int]:
        statuses = []
        with httpx2.Client(base_url=client.base_url, timeout=20.0) as own:
            while not stop.is_set():
                statuses.append(ask(own, "a", model="nano").status_code)
        return statuses

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking) for _ in range(4)]
        wait_until(lambda: len(killed.answered) >= 2, "requests in flight")
        killed.kill()
        wait_until(lambda: metric(client, "upstream_up") == 1, "the loss")
        killed.script.clear()
        killed.start()
        before = len(killed.answered)
        wait_until(lambda: len(killed.answered) > before, "its return")
        stop.set()
        statuses = [status for future in asking for status in future.result()]
    assert set(statuses) == {200}
    assert metric(client, "retries_total") >= 1


def test_a_stream_is_passed_on_as_it_comes(client: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "a"}]
    answer = client.post(CHAT, json={"model": "nano", "messages": messages, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.count("data: {") == 3
    assert answer.text.endswith("data: [DONE]\n\n")
    assert metric(client, "requests_total", "nano", "answered") == 1
    assert (
        metric(client, "first_token_seconds_count", "newest") == metric(client, "request_seconds_count", "newest") == 1
    )
    assert 0 < metric(client, "first_token_seconds_sum") <= metric(client, "request_seconds_sum") < 20


def test_a_stream_that_has_not_begun_is_begun_elsewhere(client: httpx2.Client, upstreams: list[StubUpstream]) -> None:
    upstreams[0].script.append("500")
    while upstreams[0].script:
        assert client.post(TEXT, json=STREAM).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("action", ["break", "cut"])
def test_a_stream_that_breaks_ends_with_an_error_event(
    single: httpx2.Client, upstreams: list[StubUpstream], action: str
) -> None:
    """What was sent cannot be taken back, and the client must not take it for the whole."""
    upstreams[0].script.append(action)
    answer = single.post(TEXT, json=STREAM)
    assert answer.status_code == 200
    assert "[DONE]" not in answer.text
    assert '"code":"stream_broken"' in answer.text.rstrip().rpartition("\n")[2]
    assert metric(single, "requests_total", "nano", "broken") == 1
    assert metric(single, "upstream_in_flight") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(
    single: httpx2.Client, upstreams: list[StubUpstream], stream: bool
) -> None:
    """The server sees the connection close, and stops generating."""
    upstreams[0].script.append("hang")
    with pytest.raises(httpx2.ReadTimeout):
        single.post(TEXT, json={**STREAM, "stream": stream}, timeout=0.2)
    wait_until(lambda: upstreams[0].num_left == 1, "the end of the request")
    wait_until(lambda: metric(single, "upstream_in_flight") == 0, "the end of the request")
    assert metric(single, "requests_total", "nano", "cancelled") == 1


def test_a_server_that_is_silent_for_too_long_is_504(published: Path, upstreams: list[StubUpstream]) -> None:
    """It is not asked again, nor is another: the request was being worked on."""
    with ready_gateway(published, *upstreams, timeout_s=SLOW_S / 3) as client:
        for upstream in upstreams:
            upstream.script.append("slow")
        began = time.monotonic()
        answer = ask(client, "a", model="nano")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
    assert time.monotonic() - began < 10.0
    assert sum(len(upstream.answered) for upstream in upstreams) == 1


MODELS = httpx2.Response(200, json={"data": [{"id": "nano"}]})


def polled(upstream: Upstream) -> frozenset[str]:
    asyncio.run(upstream.poll())
    return upstream.models


@pytest.mark.parametrize(
    "failure",
    [
        httpx2.ReadTimeout("late"),
        httpx2.Response(500, content=b"{}"),
        httpx2.Response(200, content=b"<html>"),
        httpx2.Response(200, content=b'{"data": 1}'),
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


@pytest.mark.parametrize(
    ("error", "left"),
    [(httpx2.ConnectError("refused"), set()), (httpx2.ConnectTimeout("late"), {"nano"})],
    ids=["refused", "late"],
)
def test_a_server_that_connects_late_is_not_taken_for_one_that_is_gone(
    error: httpx2.RequestError, left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fails, and may be answered by another; those after it are still sent to this one."""

    async def send(*_: object, **__: object) -> httpx2.Response:
        raise error

    upstream = Upstream("http://127.0.0.1:1", timeout_s=1.0)
    upstream.models = frozenset({"nano"})
    monkeypatch.setattr(upstream._client, "send", send)
    with pytest.raises(UpstreamFailedError):
        asyncio.run(upstream.send(TEXT, b"{}", {}))
    assert upstream.models == left


DONE = b"data: [DONE]\n\n"


async def outcome_after(parts: list[bytes], num_read: int) -> Outcome:
    """The outcome of a stream of which a client reads some parts and leaves."""

    async def rest() -> AsyncIterator[bytes]:
        for part in parts[1:]:
            yield part

    stream = EventStream(Upstream("http://127.0.0.1", timeout_s=1.0), parts[0], rest(), {}, AsyncExitStack())
    passed = stream.parts()
    for _ in range(num_read):
        await anext(passed)
    await stream.close()
    return stream.outcome


@pytest.mark.parametrize(
    ("parts", "num_read", "outcome"),
    [
        ([b"data: a\n\n", DONE], 2, "answered"),
        ([b"data: a\n\n", DONE[:7], DONE[7:]], 3, "answered"),
        ([b"data: a\n\n" + DONE], 1, "answered"),
        ([b"data: a\n\n", DONE], 1, "cancelled"),
        ([b"data: a\n\n", b"data: b\n\n", DONE], 2, "cancelled"),
        ([b"data: a\n\n", b"data: b\n\n"], 3, "broken"),
    ],
)
def test_a_client_that_leaves_at_the_end_of_the_stream_was_answered(
    parts: list[bytes], num_read: int, outcome: Outcome
) -> None:
    """As OpenAI's clients leave, which close at `[DONE]`; one that leaves earlier has cancelled it."""
    assert asyncio.run(outcome_after(parts, num_read)) == outcome
