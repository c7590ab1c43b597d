"""A real Prometheus with the shipped configuration in a hurry, on a port of its own."""

import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import yaml

from tests.broker import free_ports
from tests.monitoring.files import ALERTS, PROMETHEUS, shortened

START_S = 60.0
STOP_S = 30.0
INTERVAL = "1s"


class Prometheus:
    """Scrapes a daemon and a gateway each second and evaluates the shortened rules."""

    def __init__(self, folder: Path, daemon: str, gateway: str) -> None:
        self._folder = folder
        (port,) = free_ports(1)
        self._address = f"127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None
        config = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [daemon]}]
        config["scrape_configs"].append({"job_name": "streamlearn-gateway", "static_configs": [{"targets": [gateway]}]})
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (folder / "alerts.yaml").write_text(shortened(ALERTS.read_text(encoding="utf-8")))

    def __enter__(self) -> Self:
        command = [
            shutil.which("prometheus") or "prometheus",
            f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self._address}",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            said = (self._folder / "prometheus.log").read_text()[-2000:]
            assert self._process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOP_S)

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = httpx2.post(f"http://{self._address}/api/v1/query", data={"query": expression}, timeout=30.0).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return list(answer["data"]["result"])

    def firing(self) -> set[str]:
        return {sample["metric"]["alertname"] for sample in self.query('ALERTS{alertstate="firing"}')}

    def _is_ready(self) -> bool:
        try:
            return httpx2.get(f"http://{self._address}/-/ready", timeout=5.0).is_success
        except httpx2.TransportError:
            return False
