"""The processes of a fleet, each with a log of its own; all are ended on the way out."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import yaml

from tests.broker import Broker, free_ports

START_S = 600.0  # vLLM compiles and loads on a busy CPU
BASE_MODEL = "base"
VLLM_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    # The engine computes by itself: with a worker beside it both spin while they wait for each other.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Freed memory is kept: each LoRA layer copies weights for every token, and the kernel clearing pages took a third.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
_LIMITS = ("--max-lora-rank", "32", "--max-loras", "4", "--max-cpu-loras", "16", "--max-model-len", "1024")
# On a CPU a layer costs as much with an adapter that leaves it out, and only whole blocks of a prompt are reused.
_CHEAPER = ("--lora-target-modules", "gate_proj", "up_proj", "down_proj", "--block-size", "32")
_ONE_PROCESS = ("--distributed-executor-backend", "uni")


@dataclass(frozen=True)
class Servers:
    """How the model servers are started."""

    vllm: Path
    """The program."""
    backbone: Path
    """Folder of the backbone."""
    dtype: str = "float32"
    pull: bool = False
    """Whether they find adapters themselves, instead of being told."""

    @property
    def base_model(self) -> str:
        """Name of the backbone; the resolver compares it with what the server was started with."""
        return str(self.backbone) if self.pull else BASE_MODEL

    def environment(self, published: Path) -> dict[str, str]:
        """What is added to the environment."""
        adapters = published / "adapters"
        pull = {"VLLM_PLUGINS": "lora_filesystem_resolver", "VLLM_LORA_RESOLVER_CACHE_DIR": str(adapters)}
        return VLLM_ENVIRONMENT | (pull if self.pull else {})

    def command(self, port: str) -> list[str]:
        """Its command line."""
        served = [str(self.vllm), "serve", str(self.backbone), "--served-model-name", self.base_model]
        listen = ["--host", "127.0.0.1", "--port", port, "--dtype", self.dtype, "--enforce-eager", "--enable-lora"]
        return [*served, *listen, *_LIMITS, *_CHEAPER, *_ONE_PROCESS]


class Fleet:
    """Broker, daemon, replicas and gateway in one folder."""

    def __init__(self, folder: Path, *, servers: Servers, kafka: Path, first_layer: int | None = None) -> None:
        """Choose ports and write the daemon's configuration.

        Args:
            folder: For logs and state.
            servers: The replicas; the daemon has their backbone.
            kafka: KAFKA_HOME.
            first_layer: First decoder layer with an adapter.
        """
        self.folder, self.servers, self._first_layer = folder, servers, first_layer
        (folder / "broker").mkdir()
        self.broker = Broker(kafka, folder / "broker")
        ports = free_ports(4)
        self.urls = {
            name: f"http://127.0.0.1:{port}"
            for name, port in zip(("daemon", "gateway", "replica 1", "replica 2"), ports, strict=True)
        }
        self.published, self.state, self.config = folder / "published", folder / "state", folder / "config.yaml"
        self.topic = "records"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.config.write_text(yaml.safe_dump(self._settings(ports[0])))

    def __enter__(self) -> Self:
        """Start everything, and wait until it answers; of servers that pull only the first."""
        first = ["replica 1"] if self.servers.pull else ["replica 1", "replica 2"]
        (self.published / "adapters").mkdir(parents=True)  # the resolver needs it at its start
        try:
            for name in first:
                self.start(name)
            self.broker.start()
            self.broker.create_topic(self.topic)
            self.start("daemon")
            for name in first:
                self.wait(name, "/v1/models")
            self.wait("daemon", "/readyz")
            self.start("gateway")
            self.wait("gateway", "/readyz")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._running):
            self.end(name, signal.SIGTERM)
        self.broker.stop()

    def start(self, name: str) -> None:
        """Start one process."""
        command, environment = self._command(name)
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def end(self, name: str, number: signal.Signals) -> None:
        """End one process and what it started."""
        process = self._running.pop(name)
        os.killpg(process.pid, number)
        process.wait(60)

    def wait(self, name: str, path: str) -> None:
        """Wait until a process answers 200."""
        deadline = time.monotonic() + START_S
        while not is_up(self.urls[name] + path):
            assert self._running[name].poll() is None, f"{name} ended: see {self.folder / name}.log"
            assert time.monotonic() < deadline, f"{name} does not answer: see {self.folder / name}.log"
            time.sleep(0.5)

    def feed(self, lines: Sequence[bytes]) -> None:
        """Put records into the topic."""
        self.broker.produce(self.topic, list(lines))

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        port = self.urls[name].rpartition(":")[2]
        python = [sys.executable, "-m", "streamlearn"]
        if name == "daemon":
            return [*python, "run", "--config", str(self.config)], {"OMP_NUM_THREADS": "1"}
        if name == "gateway":
            upstreams = [part for replica in ("replica 1", "replica 2") for part in ("--upstream", self.urls[replica])]
            upstreams += ["--on-demand"] if self.servers.pull else []
            return [*python, "gateway", "--published", str(self.published), *upstreams, "--port", port], {}
        return self.servers.command(port), self.servers.environment(self.published)

    def _settings(self, port: int) -> dict[str, object]:
        replicas = [self.urls[name] for name in ("replica 1", "replica 2")]
        kafka = {
            "bootstrap_servers": self.broker.servers,
            "topics": [self.topic],
            "group_id": "fleet",
            "security_protocol": "PLAINTEXT",
            "offset_start": "earliest",
        }
        return {
            "state": str(self.state),
            "source": {"kafka": kafka},
            "stream": {"batch_tokens": 1024, "batch_records": 4, "linger_s": 3.0},
            "backbone": {"model": str(self.servers.backbone)},
            "adapter": {"first_layer": self._first_layer},
            "probe": {"similarity_tokens": 512},
            "holdout": {"every_records": 10},
            "snapshot": {"every_records": 40, "keep": 4},
            "publish": {
                "folder": str(self.published),
                "base_model": self.servers.base_model,
                "vllm": None if self.servers.pull else {"replicas": replicas, "interval_s": 2.0, "drain_s": 20.0},
            },
            "serve": {"port": port},
            "log": {"style": "json"},
        }


def is_up(url: str) -> bool:
    """Whether a server on this machine answers 200."""
    with suppress(httpx2.TransportError):
        return httpx2.get(url, timeout=5.0, trust_env=False).status_code == httpx2.codes.OK
    return False


def until(reached: Callable[[], bool], what: str, *, seconds: float) -> None:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)
