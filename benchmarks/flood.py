"""Health checks and training speed while clients flood the HTTP endpoint.

    streamlearn bench flood --json

A separate daemon learns the bundled sample. Quiet and flooded intervals alternate; in both, `/readyz` is requested on a
new connection each time. The flood consists of silent connections and of requests sent byte by byte. A connection that
the daemon closes is opened again after ten seconds. Speed is tokens over the time spent in training steps, without
probes and evaluations. The flooding clients run on the same cores, so the slow-down is an upper bound.
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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from benchmarks.sample import SAMPLE
from streamlearn.errors import SourceError

HOST = "127.0.0.1"
SILENT, TRICKLING = 200, 20
HEALTH_EVERY_S, TRICKLE_EVERY_S, RECONNECT_S = 0.05, 0.5, 10.0
START_S = 120.0
PASSES = 60
"""Copies of the sample in the stream: more than the daemon can learn during the benchmark."""
REQUEST_HEAD = (
    b"POST /v1/eval HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"
)


@dataclass
class FloodInterval:
    """Measurements of one quiet or flooded interval."""

    latencies_s: list[float] = field(default_factory=list)
    failures: int = 0
    tokens_per_s: float = 0.0


def report(*, rounds: int, interval_s: float, as_json: bool) -> None:
    """Measure and print."""
    result = measure(rounds=rounds, interval_s=interval_s)
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())  # noqa: T201
        return
    out = Console()
    for name, value in result.items():
        out.print(f"{name:28}{value}", highlight=False)


def measure(*, rounds: int, interval_s: float) -> dict[str, Any]:
    """Run `rounds` quiet and flooded intervals in turns and summarise them."""
    with tempfile.TemporaryDirectory() as folder:
        port, daemon = _start(Path(folder))
        try:
            quiet, flooded = asyncio.run(_alternate(port, rounds, interval_s))
        finally:
            daemon.send_signal(signal.SIGKILL)  # its state is not needed
            daemon.wait()
    return summary(quiet, flooded, rounds)


def summary(quiet: Sequence[FloodInterval], flooded: Sequence[FloodInterval], rounds: int) -> dict[str, Any]:
    """Summarise the intervals; the speed ratio is the median over pairs."""
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


def _latencies(name: str, intervals: Sequence[FloodInterval]) -> dict[str, Any]:
    latencies = sorted(latency for interval in intervals for latency in interval.latencies_s)
    return {
        f"{name}_health_asked": len(latencies),
        f"{name}_health_failed": sum(interval.failures for interval in intervals),
        f"{name}_health_p50_ms": round(1e3 * latencies[len(latencies) // 2], 1),
        f"{name}_health_p99_ms": round(1e3 * latencies[int(len(latencies) * 0.99)], 1),
        f"{name}_health_max_ms": round(1e3 * latencies[-1], 1),
        f"{name}_tokens_per_s": round(statistics.median(interval.tokens_per_s for interval in intervals)),
    }


def _start(folder: Path) -> tuple[int, "subprocess.Popen[bytes]"]:
    """Start a daemon, wait for its first training step, and return its port."""
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
    raise SourceError(f"the daemon took no training step within {START_S:g} s: {log.read_text()[-2000:]}")


async def _alternate(port: int, rounds: int, interval_s: float) -> tuple[list[FloodInterval], list[FloodInterval]]:
    quiet, flooded = [], []
    for _ in range(rounds):
        quiet.append(await _observe(port, interval_s))
        async with _flood(port):
            await asyncio.sleep(RECONNECT_S)
            flooded.append(await _observe(port, interval_s))
    return quiet, flooded


async def _observe(port: int, seconds: float) -> FloodInterval:
    """Request health at a steady rate, and read the training progress at both ends of the interval."""
    interval, started = FloodInterval(), time.perf_counter()
    before = await _progress(port)
    while time.perf_counter() - started < seconds:
        requested = time.perf_counter()
        try:
            async with asyncio.timeout(5.0):
                await _get(port, "/readyz")
            interval.latencies_s.append(time.perf_counter() - requested)
        except (OSError, TimeoutError, ValueError):
            interval.failures += 1
        await asyncio.sleep(max(0.0, HEALTH_EVERY_S - (time.perf_counter() - requested)))
    while (after := await _progress(port)) == before:  # a probe may take longer than the interval
        await asyncio.sleep(HEALTH_EVERY_S)
    (tokens, step_s), (tokens_before, step_s_before) = after, before
    interval.tokens_per_s = (tokens - tokens_before) / (step_s - step_s_before)
    return interval


async def _progress(port: int) -> tuple[float, float]:
    """Tokens trained on and seconds spent in training steps since the start."""
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
        raise ValueError(f"GET {path}: expected HTTP/1.1 200, found {head[:100]!r}")
    return body


@asynccontextmanager
async def _flood(port: int) -> AsyncIterator[None]:
    clients = [asyncio.create_task(_client(port, trickle=i < TRICKLING)) for i in range(SILENT + TRICKLING)]
    try:
        yield
    finally:
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _client(port: int, *, trickle: bool) -> None:
    """Connect, stay silent or send a request byte by byte, and reconnect when the daemon closes the connection."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                await _trickle(reader, writer, REQUEST_HEAD if trickle else b"")
            finally:
                writer.close()
        await asyncio.sleep(RECONNECT_S)


async def _trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send the data byte by byte until the peer closes the connection."""
    closed = asyncio.create_task(reader.read())
    try:
        for i in range(len(data)):
            writer.write(data[i : i + 1])
            await asyncio.wait([closed], timeout=TRICKLE_EVERY_S)
            if closed.done():
                return
        await closed
    finally:
        closed.cancel()
