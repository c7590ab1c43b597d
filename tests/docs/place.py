"""Where the documents' commands run: a state folder and ports of their own, and a daemon beside them."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from tests.docs.markdown import ROOT

CONFIG = "configs/quickstart.yaml"
STATE = "build/quickstart"
HTTP, KAFKA = "localhost:8083", "localhost:9092"


@dataclass(frozen=True)
class Place:
    """Where a block runs: a state folder and a port of its own."""

    state: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """The settings that would otherwise collide with a daemon on this machine."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        own = {"PATH": path, "STREAMLEARN_STATE": str(self.state), "STREAMLEARN_SERVE__PORT": str(self.port)}
        return {**os.environ, **own}

    def replaced(self, script: str, broker: str = KAFKA) -> str:
        """The script with this place's addresses and state folder."""
        return script.replace(HTTP, f"localhost:{self.port}").replace(KAFKA, broker).replace(STATE, str(self.state))

    def get(self, path: str) -> str:
        """The body of an answer of the daemon that serves here.

        Raises:
            OSError: it does not answer, or with an error.
        """
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60.0) as answer:
            return bytes(answer.read()).decode()


@contextmanager
def started(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process and whatever it starts; all of them are ended with the context."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
