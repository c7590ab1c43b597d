"""What the gateway adds to a request.

    python -m benchmarks.gateway --json --keep-awake

A stub answers at once, in a process of its own; so does the gateway. Requests arrive at a fixed rate, whether earlier
ones are answered or not, in turns straight to the stub and through the gateway, with the prompts of the bundled sample.

Between two requests nothing is to be done, and on a virtual machine an idle processor takes up to a millisecond to
wake, for each process on the way. A server that has other work does not see that: `--keep-awake` measures without it.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.measuring import MeasurementError, command, grid, parser, positive_float, show
from tests.gateway.sample_publication import publish_sample, sample_records, served_models
from tests.gateway.stub_upstream import free_port

ROUNDS = 10
START_S = 60.0
POLL_S = 0.05
PERCENTILES = (50, 95, 99)
_SPIN = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
_COMMAND = [sys.executable, "-m", "streamlearn", "gateway"]


def measure(*, seconds: float, requests_per_s: float) -> dict[str, Any]:
    """Measure; `seconds` is the time of requests through the gateway."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        publication = publish_sample(folder)
        with _stub(sorted(served_models(publication))) as upstream, _gateway(folder, upstream) as gateway:
            urls = {"direct": (upstream, publication.adapters[0]), "gateway": (gateway, publication.name)}
            taken, failed = asyncio.run(_in_turns(urls, seconds / ROUNDS, requests_per_s))
    quantiles = {name: np.percentile(times, PERCENTILES) * 1e3 for name, times in taken.items()}
    quantiles["added"] = quantiles["gateway"] - quantiles["direct"]
    return {
        "requests_per_s": requests_per_s,
        "requests": len(taken["gateway"]),
        "failed": failed,
        **{name: _named(values) for name, values in quantiles.items()},
    }


async def _in_turns(
    urls: dict[str, tuple[str, str]], seconds: float, requests_per_s: float
) -> tuple[dict[str, list[float]], int]:
    """Seconds per request, by where it was sent, and how many failed; the first turn of each is not counted."""
    prompts = [record["prompt"] for record in sample_records()]
    taken: dict[str, list[float]] = {name: [] for name in urls}
    failed = 0
    async with httpx2.AsyncClient(timeout=30.0, trust_env=False) as client:
        for turn in range(ROUNDS + 1):
            for name, (url, model) in urls.items():
                number = round(seconds * requests_per_s)
                first = turn * number % len(prompts)
                times = await _turn(client, url, model, (prompts + prompts)[first : first + number], seconds)
                if turn:
                    taken[name] += [took for took in times if took is not None]
                    failed += times.count(None)
    return taken, failed


async def _turn(
    client: httpx2.AsyncClient, url: str, model: str, prompts: Sequence[str], seconds: float
) -> list[float | None]:
    """Send the prompts evenly over `seconds`; seconds each took, None for one that failed."""

    async def one(prompt: str) -> float | None:
        began = time.perf_counter()
        body = {"model": model, "prompt": prompt, "max_tokens": 16}
        answer = await client.post(f"{url}/v1/completions", json=body)
        return time.perf_counter() - began if answer.status_code == 200 else None

    start, waiting = time.perf_counter(), []
    for index, prompt in enumerate(prompts):
        await asyncio.sleep(max(0.0, start + index * seconds / len(prompts) - time.perf_counter()))
        waiting.append(asyncio.ensure_future(one(prompt)))
    return list(await asyncio.gather(*waiting))


@contextmanager
def _awake() -> Iterator[None]:
    """No processor goes idle: on each a process runs that gives way to any other at once."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@contextmanager
def _gateway(folder: Path, upstream: str) -> Iterator[str]:
    """The URL of a gateway that is ready."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [*_COMMAND, "--published", str(folder), "--upstream", upstream, "--port", url.rpartition(":")[2]]
    deadline = time.monotonic() + START_S
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while not _is_ready(url):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise MeasurementError(f"the gateway was not ready in {START_S:g} s; exit code {process.poll()}")
                time.sleep(POLL_S)
            yield url
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{url}/readyz", trust_env=False).status_code == 200
    return False


@contextmanager
def _stub(models: Sequence[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.gateway.stub_upstream", *models]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def _named(values: Iterable[float]) -> dict[str, float]:
    return {f"p{percentile}_ms": round(float(value), 3) for percentile, value in zip(PERCENTILES, values, strict=True)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=positive_float, default=20.0, help="length of the measurement, each way")
    options.add_argument("--rate", type=positive_float, default=50.0, help="requests per second")
    options.add_argument("--keep-awake", action="store_true", help="let no processor go idle meanwhile")
    given = options.parse_args()
    with _awake() if given.keep_awake else nullcontext():
        result = {"kept_awake": given.keep_awake, **measure(seconds=given.seconds, requests_per_s=given.rate)}
    line = f"{result['failed']} requests failed"
    rows = {name: result[name] for name in ("direct", "gateway", "added")}
    columns = [f"p{percentile}_ms" for percentile in PERCENTILES]
    show(result, grid(rows, columns, f"{given.rate:g} requests/s"), line, as_json=given.json)


if __name__ == "__main__":
    command(main)
