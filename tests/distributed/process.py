"""The daemon as several processes that torchrun starts."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.broker import free_ports
from tests.end_to_end.process import START_AND_LEARN_S, STOP_S, DaemonProcess
from tests.forked import ForkedProcess, run_command

TIMEOUT_S = 60.0
"""`distributed.timeout_s`."""


class RanksProcess(DaemonProcess):
    """A state folder and a configuration file, for any number of runs in several processes."""

    def __init__(self, folder: Path, config: dict[str, Any], *, size: int = 2, seed: int = 0) -> None:
        super().__init__(folder, {**config, "distributed": {"timeout_s": TIMEOUT_S}})
        self.size = size
        """Of the next run."""
        self.killed: list[int] = []
        """Ranks that were killed."""
        self.seconds_to_end: list[float] = []
        """Time from each kill to the end of the last process."""
        self._random = random.Random(seed)
        self._forked: list[ForkedProcess] = []
        """The ranks of the run in progress, where torchrun did not start them."""

    def start_forked(self, size: int) -> None:
        """Start as many ranks without torchrun, which takes a fraction of the time, and return at once."""
        self.size = size
        (port,) = free_ports(1)
        address = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = ["run", "--config", str(self.config)]
        self._forked = [
            ForkedProcess(
                run_command, arguments, stderr=self.log, env={**address, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(size)
        ]
        self._process = self._forked[0]

    def start(self) -> None:
        """Start torchrun, or one process without it, and return at once."""
        self._forked = []
        if self.size == 1:
            super().start()
            return
        options = ["--standalone", "--nproc-per-node", str(self.size)]
        command = ["-m", "torch.distributed.run", *options, "-m", self.module, "run", "--config", str(self.config)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(STOP_S))}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=log, env=environ
            )

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, of those that run."""
        if self._forked:
            return {rank: process.pid for rank, process in enumerate(self._forked)}
        ranks = {}
        for entry in Path("/proc").iterdir():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                environ = (entry / "environ").read_bytes().split(b"\0")
            except (OSError, IndexError):  # no process, or it has just ended
                continue
            rank = next((line.removeprefix(b"RANK=") for line in environ if line.startswith(b"RANK=")), None)
            if parent == self.pid and rank is not None:
                ranks[int(rank)] = int(entry.name)
        return ranks

    def kill(self, rank: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one rank, once all have started, and wait until every process has ended."""
        while len(ranks := self.ranks()) < self.size:
            assert self.is_running, self.log.read_text()[-3000:]
            time.sleep(0.01)
        chosen = self._random.choice(sorted(ranks)) if rank is None else rank
        sent_at = time.monotonic()
        os.kill(ranks[chosen], number)
        self.killed.append(chosen)
        assert self._process is not None
        assert self._process.wait(timeout=TIMEOUT_S) != 0, "a run that lost a rank must not look complete"
        while any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
            assert time.monotonic() - sent_at < TIMEOUT_S, f"still running: {ranks}"
            time.sleep(0.01)
        self.seconds_to_end.append(time.monotonic() - sent_at)

    def wait(self) -> int:
        """Wait for the end of the stream, or of a start that fails, and return the exit code."""
        assert self._process is not None
        return self._process.wait(timeout=START_AND_LEARN_S)

    def wait_for_all(self) -> None:
        """Wait for the end of every forked rank."""
        for process in self._forked:
            process.wait(timeout=TIMEOUT_S)

    def pause(self, seconds: float) -> None:
        """Suspend one rank, and resume it."""
        ranks = self.ranks()
        chosen = ranks[self._random.choice(sorted(ranks))]
        os.kill(chosen, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(chosen, signal.SIGCONT)

    def terminate(self) -> int:
        """Send SIGTERM, wait for the end, and return the exit code; torchrun's, which is always 1, counts as 0."""
        ranks = self.ranks()
        code = super().terminate()
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()), f"still running: {ranks}"
        return code - 1 if ranks and not self._forked else code
