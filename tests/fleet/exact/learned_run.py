"""A daemon that has learned three tasks and waits, and its regimes as exports."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import orjson
import yaml

from tests.docs.place import free_port, started

LEARN_S = 1800.0  # three tasks in float32 beside other work
REQUEST_S = 600.0


@dataclass(frozen=True)
class LearnedRun:
    """A configuration, the daemon that runs it, and the exports of all regimes."""

    config: Path
    url: str
    peft: Path
    """Folder of the exports for PEFT and vLLM, one for each regime."""
    gguf: Path
    """Those for llama.cpp."""

    @property
    def regimes(self) -> list[str]:
        """Names of the exports, in the order of the regimes."""
        return sorted(path.name for path in self.peft.iterdir())

    def generate(self, prompts: Sequence[str], tokens: int) -> list[tuple[str | None, str]]:
        """What answered each prompt, a regime's export or None for anything else, and its greedy answer."""
        with httpx2.Client(base_url=self.url, timeout=REQUEST_S) as client:
            answers = []
            for prompt in prompts:
                body = {"model": "streamlearn", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                answer.raise_for_status()
                value = answer.json()
                by_regime = value["route"]["answered_by"] == "regime"
                answers.append(
                    (f"regime-{value['route']['regime']}" if by_regime else None, value["choices"][0]["text"])
                )
            return answers


@contextmanager
def learned(folder: Path, backbone: str, records: Sequence[dict[str, Any]]) -> Iterator[LearnedRun]:
    """Learn the records, export every regime, and keep the daemon running."""
    config, port = folder / "config.yaml", free_port()
    (folder / "stream.jsonl").write_bytes(
        b"".join(orjson.dumps(each, option=orjson.OPT_APPEND_NEWLINE) for each in records)
    )
    config.write_text(yaml.safe_dump(_settings(folder, backbone, port)))
    run = LearnedRun(config, f"http://127.0.0.1:{port}", folder / "peft", folder / "gguf")
    python = [sys.executable, "-m", "streamlearn"]
    with started([*python, "run", "--config", str(config)], os.environ, folder / "daemon.log") as daemon:
        deadline = time.monotonic() + LEARN_S
        while not _is_learned(run.url, len(records)):
            assert daemon.poll() is None, f"the daemon ended: see {folder / 'daemon.log'}"
            assert time.monotonic() < deadline, f"not learned within {LEARN_S:.0f} s: see {folder / 'daemon.log'}"
            time.sleep(1.0)
        token = (folder / "state" / "http.token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        httpx2.post(f"{run.url}/v1/snapshots", headers=headers, timeout=REQUEST_S).raise_for_status()
        for form, out in (("peft", run.peft), ("gguf", run.gguf)):
            command = [*python, "export", "--config", str(config), "--all", "--format", form, "--out", str(out)]
            subprocess.run(command, check=True, capture_output=True)
        yield run


def _is_learned(url: str, records: int) -> bool:
    try:
        status = httpx2.get(f"{url}/v1/status", timeout=REQUEST_S).json()
    except httpx2.TransportError:
        return False
    return bool(status["records_trained"] + status["records_held_out"] >= records)


def _settings(folder: Path, backbone: str, port: int) -> dict[str, Any]:
    return {
        "state": str(folder / "state"),
        "source": {"jsonl": {"path": str(folder / "stream.jsonl"), "follow": True}},
        "stream": {"batch_tokens": 1024, "batch_records": 8, "linger_s": 5.0},
        "backbone": {"model": backbone, "dtype": "float32"},
        "probe": {"similarity_tokens": 512},
        "snapshot": {"every_records": 1000},
        "serve": {"port": port},
        "log": {"style": "json"},
    }
