"""A broker, a daemon that learns from it and publishes, a gateway, and a Prometheus; all end with the context."""

import gzip
import itertools
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import orjson

from tests.broker import Broker, free_ports
from tests.end_to_end.process import DaemonProcess
from tests.gateway.sample_publication import publish_sample, served_models
from tests.gateway.stub_upstream import StubUpstream
from tests.monitoring.faulty_daemon import HANG, SPOIL
from tests.monitoring.prometheus import Prometheus
from tests.publish.stub_replica import StubReplica

SAMPLE = Path(__file__).parents[2] / "configs" / "sample" / "superni.train.jsonl.gz"
TOPIC, DEAD = "records", "dead"
WAIT_S = 600.0  # a fault shows within a minute on two idle cores
POLL_S = 0.5


class FaultyDaemon(DaemonProcess):
    """A daemon that can be made to refuse an update, or to hang in one."""

    module = "tests.monitoring.faulty_daemon"


class Stage:
    """What the faults act on."""

    def __init__(self, folder: Path, kafka: Path) -> None:
        (folder / "broker").mkdir()
        (folder / "prometheus").mkdir()
        self.broker = Broker(kafka, folder / "broker")
        self._port, self._gateway_port = free_ports(2)
        self.target, self.gateway_target = f"127.0.0.1:{self._port}", f"127.0.0.1:{self._gateway_port}"
        self.replica = StubReplica()
        self.replica.start()
        self.published, self.gateway_published = folder / "published", folder / "gateway"
        self.upstream = StubUpstream(served_models(publish_sample(self.gateway_published)))
        self._folder = folder
        self._topic = TOPIC
        self.daemon = FaultyDaemon(folder / "daemon", self._settings(publish=self._publish()))
        self.prometheus = Prometheus(folder / "prometheus", self.target, self.gateway_target)
        self._fed = 0
        self._open = ExitStack()
        self._tasks = _tasks()
        self._cycles = {task: itertools.cycle(rows) for task, rows in self._tasks.items()}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.broker.start()
            stack.callback(self.broker.kill)
            for topic in (TOPIC, DEAD):
                self.broker.create_topic(topic)
            self.daemon.start()
            stack.callback(self.daemon.end)
            stack.callback(self.replica.stop)
            stack.enter_context(self.upstream)
            self.gateway = subprocess.Popen(self._gateway_command(), stderr=subprocess.DEVNULL)
            stack.callback(self.gateway.kill)
            stack.enter_context(self.prometheus)
            self.daemon.wait_until(lambda: self.value("streamlearn_ready") == 1, "it was ready")
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def tasks(self) -> list[str]:
        return list(self._tasks)

    def records(self, task: int, count: int, **changes: Any) -> list[bytes]:
        """The next records of a task of the sample, with some fields changed."""
        cycle = self._cycles[self.tasks[task]]
        return [orjson.dumps({**next(cycle), **changes}) for _ in range(count)]

    def spoiled(self, count: int) -> list[bytes]:
        return [orjson.dumps({"prompt": f"{SPOIL}: {number}", "completion": " no"}) for number in range(count)]

    def endless(self) -> list[bytes]:
        return [orjson.dumps({"prompt": HANG, "completion": " no"})]

    def feed(self, values: Sequence[bytes]) -> None:
        self.broker.produce(self._topic, list(values))
        self._fed += len(values)

    def learn(self, values: Sequence[bytes]) -> None:
        """Append records, and wait until all that were ever fed are done."""
        self.feed(values)
        self.wait(lambda: self._position() >= self._fed, "everything is learned")

    def start_over(self, **changes: Any) -> None:
        """End the daemon and start another in its place, which knows nothing and reads an empty topic."""
        self.daemon.end()
        self._topic, self._fed = f"{TOPIC}-again", 0
        self.broker.create_topic(self._topic)
        self.daemon = FaultyDaemon(self._folder / "daemon-again", self._settings(**changes))
        self.daemon.start()
        self._open.callback(self.daemon.end)
        self.daemon.wait_until(lambda: self.value("streamlearn_ready") == 1, "it was ready again")

    def command(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "streamlearn", *arguments, "--config", str(self.daemon.config)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def ask(self, prompt: str, *, gateway: bool = False) -> httpx2.Response:
        body = {"model": "streamlearn", "prompt": prompt, "max_tokens": 4}
        target = self.gateway_target if gateway else self.target
        return httpx2.post(f"http://{target}/v1/completions", json=body, timeout=60.0)

    def value(self, expression: str) -> float | None:
        samples = self.prometheus.query(expression)
        return float(samples[0]["value"][1]) if samples else None

    def wait(self, done: Callable[[], bool], what: str) -> float:
        started = time.monotonic()
        while not done():
            log = self.daemon.log.read_text()[-2000:]
            assert time.monotonic() - started < WAIT_S, f"not in {WAIT_S:g} s: {what}\n{log}"
            time.sleep(POLL_S)
        return time.monotonic() - started

    def _settings(self, **changes: Any) -> dict[str, Any]:
        return {
            "source": {
                "kafka": {
                    "bootstrap.servers": self.broker.servers,
                    "topics": [self._topic],
                    "group.id": "alerts",
                    "security.protocol": "PLAINTEXT",
                    "lag.interval.s": 1,
                }
            },
            "dead_letters": {"topic": DEAD},
            "stream": {"max_tokens": 256, "batch_tokens": 1024, "linger_s": 2},
            "backbone": {"model": "builtin:nano", "dtype": "float32"},
            "probe": {"similarity_tokens": 512},
            "holdout": {"every_records": 10},
            "snapshot": {"every_records": 100, "every_s": 5},
            "serve": {"port": self._port},
            "log": {"style": "json", "level": "warning"},
            **changes,
        }

    def _publish(self) -> dict[str, Any]:
        """Publications; five records are the fewest with which the gate can decide."""
        vllm = {"replicas": [self.replica.url], "interval_s": 1}
        return {"folder": str(self.published), "min_holdout_records": 5, "base_model": "base", "vllm": vllm}

    def _gateway_command(self) -> list[str]:
        options = ["--published", str(self.gateway_published), "--upstream", self.upstream.url]
        return [sys.executable, "-m", "streamlearn", "gateway", *options, "--port", str(self._gateway_port)]

    def _position(self) -> int:
        """Of the daemon's own status: a scrape may be older than what was just fed."""
        status = httpx2.get(f"http://{self.target}/v1/status", timeout=60.0).json()
        return sum(row["position"] for row in status["partitions"])


def _tasks() -> dict[str, list[dict[str, Any]]]:
    tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with gzip.open(SAMPLE, "rb") as lines:
        for row in map(orjson.loads, lines):
            tasks[row["meta"]["task"]].append(row)
    return dict(tasks)
