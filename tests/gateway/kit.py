"""A gateway in this process, in front of stub servers."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2

from streamlearn.gateway import publication
from streamlearn.gateway import upstreams as upstreams_module
from streamlearn.gateway.app import create_app
from streamlearn.http.server import HttpServer, Listener
from streamlearn.settings import GatewaySettings
from tests.gateway.sample_publication import nano_decoder, sample_records
from tests.gateway.stub_upstream import StubUpstream

UNKNOWN_PROMPTS = (
    "Übersetze den Satz ins Deutsche: the rain in Spain",
    "SELECT name FROM users WHERE id = 7;",
    "7 8 9",
)
DEADLINE_S = 20.0
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def prompts_of_each_task() -> list[str]:
    """One prompt of each of the sample's tasks, whose regimes are 1, 2 and 3."""
    return [sample_records()[at]["prompt"] for at in (100, 300, 480)]


@contextmanager
def gateway(
    published: Path | str, *upstreams: StubUpstream | str, token: str = "", **options: Any
) -> Iterator[httpx2.Client]:
    """A client of a gateway."""
    urls = tuple(each if isinstance(each, str) else each.url for each in upstreams)
    settings = GatewaySettings(published=published, upstreams=urls, port=0, require_token=bool(token), **options)
    app = create_app(settings, token=token)
    server = HttpServer(app, Listener.for_requests(settings), grace_s=10.0)
    with (
        patch.object(upstreams_module, "POLL_S", 0.05),
        patch.object(upstreams_module, "DNS_S", 0.05),
        patch.object(publication, "INTERVAL_S", 0.05),
        patch.object(publication, "STORE_INTERVAL_S", 0.05),
        patch.object(publication, "read_decoder", lambda _: nano_decoder()),
        server,
        httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=20.0) as client,
    ):
        yield client


@contextmanager
def ready_gateway(published: Path | str, *upstreams: StubUpstream | str, **options: Any) -> Iterator[httpx2.Client]:
    """A client of a gateway that has a publication, and has polled all servers."""
    with gateway(published, *upstreams, **options) as client:
        wait_until(lambda: is_ready(client) and metric(client, "upstream_up") == len(upstreams), "readiness")
        yield client


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Fail unless the condition comes true in time."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def is_ready(client: httpx2.Client) -> bool:
    return client.get("/readyz").status_code == 200


def metric(client: httpx2.Client, name: str, *labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    rows = [line.rpartition(" ") for line in client.get("/metrics").text.splitlines()]
    prefix = f"streamlearn_gateway_{name}"
    return sum(
        float(value)
        for key, _, value in rows
        if key.partition("{")[0] == prefix and all(f'"{label}"' in key for label in labels)
    )


def ask(client: httpx2.Client, prompt: Any, *, model: str = "streamlearn", **fields: Any) -> httpx2.Response:
    """A text completion."""
    return client.post(TEXT, json={"model": model, "prompt": prompt, "max_tokens": 5, **fields})
