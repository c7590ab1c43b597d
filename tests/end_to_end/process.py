"""The daemon as a process: started, observed through its files, killed, compared."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import yaml
from safetensors.torch import load_file
from torch import Tensor

from streamlearn.regimes.regime import RegimesState
from streamlearn.snapshot.parts import Snapshot, read_manifest
from tests.broker import Broker, FileTopics
from tests.forked import ForkedProcess, RunningProcess, run_command
from tests.learners import timeless

STOP_S = 120.0  # maximum wait for an orderly end; callers check tighter limits themselves
START_AND_LEARN_S = 240.0  # a start takes 5 s and the stream 10 s on two idle cores; CI may be slower


def configuration(broker: Broker | FileTopics, topic: str, dead: str, backbone: Path, per_batch: int) -> dict[str, Any]:
    """Settings with a tiny backbone, so that the stream takes seconds; batches are limited by count."""
    return {
        **broker.sections(topic, dead),
        "stream": {
            "max_tokens": 128,
            "batch_tokens": 128 * per_batch,
            "batch_records": per_batch,
            "linger_s": None,  # the runs compared end at the same step, however long a busy machine takes to stop them
        },
        "backbone": {
            "model": str(backbone),
            "dtype": "float32",
        },  # auto measures the speed, which varies on a busy machine
        "adapter": {"num_heads": 4},
        "learner": {"lr": 1e-3},
        "snapshot": {"every_records": 200},
        "serve": {"port": 0},
        "log": {"style": "json", "level": "error"},
    }


class DaemonProcess:
    """A state folder and a configuration file, for any number of runs."""

    module = "streamlearn"
    """What is run."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self.state = folder / "state"
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump({**config, "state": str(self.state)}))
        self.log = folder / "log.jsonl"
        self._process: RunningProcess | None = None

    def start(self) -> None:
        """Start `streamlearn run` and return at once."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, "run", "--config", str(self.config)],
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done`; fail with the end of the log when the process ends first or time is up."""
        deadline = time.monotonic() + START_AND_LEARN_S
        while not done():
            assert self._process is not None
            assert self._process.poll() is None, f"the daemon ended before {what}: {self.log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"{what} did not happen: {self.log.read_text()[-2000:]}"
            time.sleep(0.01)

    def learn(self, steps: int, kills: Sequence[int] = ()) -> None:
        """Start, and wait until the journal has `steps`; SIGKILL and start again at each of `kills`."""
        for step in [*kills, steps]:
            self.start()
            self.wait_until(lambda step=step: self.journalled_step() >= step, f"step {step}")  # type: ignore[misc]
            if step < steps:
                self.kill()

    def journalled_step(self) -> int:
        """The step of the last complete journal line; 0 without one."""
        last = self.last_journalled()
        return 0 if last is None else int(last["step"])

    def last_journalled(self) -> dict[str, Any] | None:
        """The last complete journal line; None without one."""
        try:
            lines = (self.state / "journal.jsonl").read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return None
        whole = [line for line in lines if line.endswith(b"\n")]
        return dict(orjson.loads(whole[-1])) if whole else None

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of the log, which must be JSON, about one event."""
        lines = [orjson.loads(line) for line in self.log.read_bytes().splitlines() if line.startswith(b"{")]
        return [line for line in lines if line["event"] == name]

    def kill(self) -> None:
        """Send SIGKILL and wait for the process to end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> int:
        """Send SIGTERM and return the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=STOP_S)

    def wait_for_end(self, timeout_s: float) -> int:
        """Wait for its end and return the exit code."""
        assert self._process is not None
        return self._process.wait(timeout=timeout_s)

    def pause(self, seconds: float) -> None:
        """Suspend the process, as on a suspended machine, and resume it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    @property
    def pid(self) -> int:
        """The process, which must have been started."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def end(self) -> None:
        """Kill the process if it is still running."""
        if self.is_running:
            self.kill()

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a complete snapshot."""
        return any(path.name.isdecimal() for path in self.state.glob("snapshots/*"))

    def newest(self) -> "Final":
        """The newest snapshot."""
        names = sorted(name for name in os.listdir(self.state / "snapshots") if name.isdecimal())
        return Final(self.state / "snapshots" / names[-1])


class ForkedDaemon(DaemonProcess):
    """A daemon that starts faster, for tests of what comes after its start."""

    def start(self) -> None:
        """Start `streamlearn run` and return at once."""
        self._process = ForkedProcess(run_command, ["run", "--config", str(self.config)], stderr=self.log)


class Final:
    """The final state of a run, from a snapshot."""

    def __init__(self, folder: Path) -> None:
        self.manifest: dict[str, Any] = orjson.loads((folder / "manifest.json").read_bytes())
        self.folder = folder

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor: adapter, optimizer and the rest of the state."""
        state = self.folder / "state.safetensors"
        others = sorted(set(self.folder.rglob("*.safetensors")) - {state})
        assert any(path.name == "adapter_model.safetensors" for path in others)
        named = {f"{path.relative_to(self.folder)}.{k}": v for path in others for k, v in load_file(path).items()}
        return {**timeless(load_file(state)), **named}

    def regimes(self) -> RegimesState:
        """What is kept about regimes."""
        return Snapshot(self.folder, read_manifest(self.folder)).component("regimes", RegimesState)

    def ledger(self) -> dict[int, tuple[int, int, int]]:
        """Per partition: records trained on or held out, records dead-lettered, position."""
        positions = {row[1]: row[2] for row in self.manifest["position"]}
        return {row[1]: (row[2] + row[4], row[3], positions[row[1]]) for row in self.manifest["ledger"]}
