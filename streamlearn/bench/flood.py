"""Health and training while strangers hold on to the endpoint: silent connections, and requests that trickle in.

    streamlearn bench flood --json

A daemon of its own learns the bundled sample. Quiet and flooded stretches take turns; in both, health is asked for on a
new connection each time. A connection that the daemon closes is opened again ten seconds later. Speed is tokens over
the time spent in steps, probes and scorings left out. Whoever floods uses the same cores, so the slow-down is an upper
bound.
"""

import asyncio
import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from streamlearn.bench.speed import SAMPLE
from streamlearn.errors import SourceError

HOST = "127.0.0.1"
SILENT, TRICKLING = 200, 20
ASK_EVERY_S, TRICKLE_EVERY_S, AGAIN_S = 0.05, 0.5, 10.0
START_S = 120.0
PASSES = 60
"""Over the sample: more than the daemon can learn in the time."""
HEAD = b"POST /v1/eval HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"


@dataclass
class Stretch:
    """What was seen in one stretch of time."""

    latencies_s: list[float] = field(default_factory=list)
    failures: int = 0
    tokens_per_s: float = 0.0


def report(*, rounds: int, stretch_s: float, as_json: bool) -> None:
    """Measure and print."""
    result = measure(rounds=rounds, stretch_s=stretch_s)
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())  # noqa: T201
        return
    out = Console()
    for name, value in result.items():
        out.print(f"{name:28}{value}", highlight=False)


def measure(*, rounds: int, stretch_s: float) -> dict[str, Any]:
    """Quiet and flooded stretches in turns, `rounds` of each."""
    with tempfile.TemporaryDirectory() as folder:
        port, daemon = _start(Path(folder))
        try:
            quiet, flooded = asyncio.run(_take_turns(port, rounds, stretch_s))
        finally:
            daemon.send_signal(signal.SIGKILL)  # its state is thrown away
            daemon.wait()
    return {
        "silent_connections": SILENT,
        "trickling_requests": TRICKLING,
        "rounds": rounds,
        **_latencies("quiet", quiet),
        **_latencies("flooded", flooded),
        "training_flooded_over_quiet": round(
            statistics.median(f.tokens_per_s / q.tokens_per_s for f, q in zip(flooded, quiet, strict=True)), 3
        ),
    }


def _latencies(name: str, stretches: list[Stretch]) -> dict[str, Any]:
    taken = sorted(latency for stretch in stretches for latency in stretch.latencies_s)
    return {
        f"{name}_health_asked": len(taken),
        f"{name}_health_failed": sum(stretch.failures for stretch in stretches),
        f"{name}_health_p50_ms": round(1e3 * taken[len(taken) // 2], 1),
        f"{name}_health_p99_ms": round(1e3 * taken[int(len(taken) * 0.99)], 1),
        f"{name}_health_max_ms": round(1e3 * taken[-1], 1),
        f"{name}_tokens_per_s": round(statistics.median(stretch.tokens_per_s for stretch in stretches)),
    }


def _start(folder: Path) -> tuple[int, "subprocess.Popen[bytes]"]:
    """A daemon with much to learn, once it learns; its port."""
    (folder / "records.jsonl").write_bytes(gzip.decompress(SAMPLE.read_bytes()) * PASSES)
    config = {
        "state": str(folder / "state"),
        "source": {"jsonl": {"path": str(folder / "records.jsonl")}},
        "serve": {"port": 0},
        "log": {"style": "json", "level": "info"},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    log = folder / "log"
    command = [sys.executable, "-m", "streamlearn", "run", "--config", str(folder / "config.yaml")]
    with log.open("wb") as errors:
        daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=dict(os.environ))  # noqa: S603
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and daemon.poll() is None:
        events = [orjson.loads(line) for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"}\n")]
        if any(event["event"] == "step_taken" for event in events):
            return next(event["port"] for event in events if event["event"] == "http_started"), daemon
        time.sleep(0.1)
    daemon.kill()
    raise SourceError(f"the daemon did not begin to learn within {START_S:g} s: {log.read_text()[-2000:]}")


async def _take_turns(port: int, rounds: int, stretch_s: float) -> tuple[list[Stretch], list[Stretch]]:
    quiet, flooded = [], []
    for _ in range(rounds):
        quiet.append(await _watch(port, stretch_s))
        async with _flood(port):
            await asyncio.sleep(AGAIN_S)
            flooded.append(await _watch(port, stretch_s))
    return quiet, flooded


async def _watch(port: int, seconds: float) -> Stretch:
    """Ask for health at a steady pace, and how far training is at both ends."""
    stretch, started = Stretch(), time.perf_counter()
    before = await _progress(port)
    while time.perf_counter() - started < seconds:
        asked = time.perf_counter()
        try:
            async with asyncio.timeout(5.0):
                await _get(port, "/readyz")
            stretch.latencies_s.append(time.perf_counter() - asked)
        except (OSError, TimeoutError, ValueError):
            stretch.failures += 1
        await asyncio.sleep(max(0.0, ASK_EVERY_S - (time.perf_counter() - asked)))
    while (after := await _progress(port)) == before:  # a probe may take longer than the stretch
        await asyncio.sleep(ASK_EVERY_S)
    (tokens, seconds), (tokens_before, seconds_before) = after, before
    stretch.tokens_per_s = (tokens - tokens_before) / (seconds - seconds_before)
    return stretch


async def _progress(port: int) -> tuple[float, float]:
    """Tokens trained, and seconds spent in steps, since the start."""
    lines = (await _get(port, "/metrics")).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return float(values["streamlearn_tokens_trained_total"]), float(values["streamlearn_step_seconds_sum"])


async def _get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError(f"{path}: {head[:100]!r}")
    return body


@asynccontextmanager
async def _flood(port: int) -> AsyncIterator[None]:
    strangers = [asyncio.create_task(_hold(port, trickle=i < TRICKLING)) for i in range(SILENT + TRICKLING)]
    try:
        yield
    finally:
        for each in strangers:
            each.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)


async def _hold(port: int, *, trickle: bool) -> None:
    """One stranger: connects, says nothing or little, and comes back when it is put out."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                await _say(reader, writer, HEAD if trickle else b"")
            finally:
                writer.close()
        await asyncio.sleep(AGAIN_S)


async def _say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes) -> None:
    closed = asyncio.create_task(reader.read())
    try:
        for i in range(len(words)):
            writer.write(words[i : i + 1])
            await asyncio.wait([closed], timeout=TRICKLE_EVERY_S)
            if closed.done():
                return
        await closed
    finally:
        closed.cancel()
