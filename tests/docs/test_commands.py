"""Every command block that a document marks as runnable runs as it stands there.

    <!-- run -->            on its own
    <!-- run: daemon -->    while `streamlearn run --config configs/quickstart.yaml` runs
    <!-- run: broker -->    with a real Apache Kafka

The mark is a line of its own directly before the fence. A block is run by `bash -euo pipefail` from the repository's
root, with this environment's commands first on PATH. What a document must name although it differs from machine to
machine is replaced before: addresses and the state folder, see `replaced`.
"""

import gzip
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from tests.broker import Broker, needed_kafka
from tests.docs.markdown import KINDS, ROOT, Block, blocks, documents

BLOCKS = [block for document in documents() for block in blocks(document)]
SAMPLE = ROOT / "configs" / "sample" / "superni.train.jsonl.gz"
CONFIG = "configs/quickstart.yaml"
STATE = "build/quickstart"
HTTP, KAFKA = "localhost:8083", "localhost:9092"
LIMIT_S = 300.0  # a start is 10 s on two idle cores; CI's may be busy
POLL_S = 0.2


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


def of_kind(kind: str) -> list[Block]:
    """The blocks of one kind."""
    return [block for block in BLOCKS if block.kind == kind]


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


def run(script: str, environment: Mapping[str, str], folder: Path) -> None:
    """Run a block; it must exit 0 in time."""
    log = folder / "output.txt"
    with started(["bash", "-euo", "pipefail", "-c", script], environment, log) as process:
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
    output = log.read_text(encoding="utf-8", errors="replace")
    assert code == 0, f"exit code {code}, None is more than {LIMIT_S:g} s:\n{script}\n{output[-4000:]}"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A state folder and a free port."""
    return Place(tmp_path / "state", free_port())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The quickstart's daemon, which has learned some records and waits for more."""
    folder = tmp_path_factory.mktemp("daemon")
    records = folder / "records.jsonl"
    with gzip.open(SAMPLE, "rb") as sample:
        records.write_bytes(b"".join(islice(sample, 48)))
    here = Place(folder / "state", free_port())
    source = {"STREAMLEARN_SOURCE__JSONL__PATH": str(records), "STREAMLEARN_SOURCE__JSONL__FOLLOW": "true"}
    command = [sys.executable, "-m", "streamlearn", "run", "--config", CONFIG]
    log = folder / "log.txt"
    with started(command, {**here.environment, **source}, log) as process:
        deadline = time.monotonic() + LIMIT_S
        while not is_ready(here.port):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(POLL_S)
        yield here


def is_ready(port: int) -> bool:
    """Whether the daemon on this port takes jobs."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_every_mark_is_one_that_is_run() -> None:
    """A mistyped mark would otherwise be a block that nothing runs; each is a shell block."""
    assert [str(block) for block in BLOCKS if block.kind not in KINDS or block.language not in ("bash", "sh")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_blocks_of_each_kind(kind: str) -> None:
    """So that a change of the documents cannot leave a test with nothing to run."""
    assert of_kind(kind)


@pytest.mark.parametrize("block", of_kind("run"), ids=str)
def test_commands_run(block: Block, place: Place, tmp_path: Path) -> None:
    """On their own."""
    run(place.replaced(block.script), place.environment, tmp_path)


@pytest.mark.parametrize("block", of_kind("run: daemon"), ids=str)
def test_commands_run_beside_a_daemon(block: Block, daemon: Place, tmp_path: Path) -> None:
    """That answers on its port and holds its state folder."""
    run(daemon.replaced(block.script), daemon.environment, tmp_path)


@pytest.mark.broker
@pytest.mark.parametrize("block", of_kind("run: broker"), ids=str)
def test_commands_run_with_a_broker(block: Block, place: Place, broker: Broker, tmp_path: Path) -> None:
    """Against a real Apache Kafka."""
    kafka = {
        "KAFKA_HOME": str(needed_kafka()),
        "KAFKA_HEAP_OPTS": "-Xmx128m",
        "LOG_DIR": str(tmp_path),
        "STREAMLEARN_SOURCE__KAFKA__BOOTSTRAP_SERVERS": broker.servers,
    }
    run(place.replaced(block.script, broker.servers), {**place.environment, **kafka}, tmp_path)
