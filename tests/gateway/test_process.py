"""The process: without torch, and ended by SIGTERM."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2

from streamlearn.gateway.publication import LoadedPublication
from tests.gateway.stub_upstream import StubUpstream, free_port

from .kit import CHAT, ask, prompts_of_each_task, wait_until

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from streamlearn.cli.main import main
main()
"""


@contextmanager
def started(published: Path, upstream: StubUpstream) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A gateway that is ready, and its URL."""
    port = free_port()
    options = ["--published", str(published), "--upstream", upstream.url, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", WITHOUT_TORCH, "gateway", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: answers(process, url), "readiness")
            yield process, url
        finally:
            process.kill()


def answers(process: "subprocess.Popen[bytes]", url: str) -> bool:
    assert process.poll() is None, process.stderr and process.stderr.read()
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{url}/readyz").status_code == 200
    return False


def test_it_routes_without_torch_and_sigterm_ends_it(published: Path, upstreams: list[StubUpstream]) -> None:
    """Prompts and conversations have the scores that they have with torch. Requests in flight are answered."""
    loaded = LoadedPublication.read(published)
    with (
        started(published, upstreams[0]) as (process, url),
        httpx2.Client(base_url=url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        for prompt in prompts_of_each_task():
            assert ask(client, prompt).headers["x-streamlearn-score"] == repr(loaded.route(prompt).score)
            messages = [{"role": "user", "content": prompt}]
            answer = client.post(CHAT, json={"model": "streamlearn", "messages": messages})
            assert answer.headers["x-streamlearn-score"] == repr(loaded.route(tuple(messages)).score)
        num_answered = len(upstreams[0].answered)
        upstreams[0].script.append("slow")
        waiting = pool.submit(ask, client, "a", model="nano")
        wait_until(lambda: len(upstreams[0].answered) > num_answered, "the request")
        process.send_signal(signal.SIGTERM)
        assert waiting.result().status_code == 200
        assert process.wait(20.0) == 0
        assert process.stderr is not None
        events = process.stderr.read().decode()
    for event in ("gateway_started", "publication_taken_up", "stop_requested", "gateway_stopped"):
        assert f'"{event}"' in events
