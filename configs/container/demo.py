"""A broker, a daemon that learns from it, and a feed of the bundled sample. `make demo`; ends with Ctrl-C.

With a container engine that has compose it runs compose.yaml, which adds Prometheus and Grafana. Without one, or with
`--no-containers`, it starts the same broker, daemon and feed from KAFKA_HOME. It ends only what it started.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "configs" / "container" / "compose.yaml"
CONFIG = ROOT / "configs" / "kafka-local.yaml"
SAMPLE = ROOT / "configs" / "sample" / "superni.train.jsonl.gz"
TOPICS = ("records", "records.dead")
ENGINES = (("docker", "compose"), ("podman", "compose"))
START_S = 120.0  # a broker takes 5 s and a daemon 10 s on two idle cores
BUILD_S = 3600.0  # the image is built first
STOP_S = 120.0  # a step, a snapshot and open requests


class DemoError(Exception):
    """The demo cannot go on; the message says what to do."""


def main() -> None:
    """Start everything, open the page, wait for Ctrl-C, end everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-containers", action="store_true", help="start from KAFKA_HOME even with an engine")
    parser.add_argument("--port", type=int, default=8083, help="of the page, without containers")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "demo", help="for state and logs, likewise")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts what it runs behind others with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    engine = None if options.no_containers else find_engine()
    try:
        with ExitStack() as stack:
            if engine is not None:
                url = stack.enter_context(compose(engine))
            else:
                url = stack.enter_context(processes(kafka_home(), options.folder, options.port))
            show(url)
            signal.pause()
    except KeyboardInterrupt:
        print("ended")
    except DemoError as error:
        sys.exit(f"demo: {error}")


def find_engine() -> Sequence[str] | None:
    """The first container engine that has compose and answers; None without one."""
    for engine in ENGINES:
        if shutil.which(engine[0]) and _succeeds([*engine, "version"]) and _succeeds([engine[0], "info"]):
            return engine
    return None


def kafka_home() -> Path:
    """The folder of an unpacked Apache Kafka.

    Raises:
        DemoError: KAFKA_HOME does not name one, or there is no Java.
    """
    home = Path(os.environ.get("KAFKA_HOME", "/nonexistent"))
    if not (home / "bin" / "kafka-server-start.sh").exists():
        raise DemoError("expected a container engine with compose, or KAFKA_HOME to name an unpacked Apache Kafka 4")
    if shutil.which("java") is None:
        raise DemoError("expected java on PATH, which Apache Kafka needs: install Java 17")
    return home


@contextmanager
def compose(engine: Sequence[str]) -> Iterator[str]:
    """Run compose.yaml; yields the page's address."""
    command = [*engine, "-f", str(COMPOSE)]
    process = subprocess.Popen([*command, "up", "--build"], start_new_session=True)
    url = "http://127.0.0.1:8083"
    try:
        wait_until(lambda: answers(f"{url}/readyz"), process, "the daemon's container", BUILD_S)
        yield url
    finally:
        subprocess.run([*command, "down"], check=False)
        process.wait(STOP_S)


@contextmanager
def processes(home: Path, folder: Path, port: int) -> Iterator[str]:
    """Broker, daemon and feed as processes, their logs in `folder`; yields the page's address."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    servers = "127.0.0.1:{}".format(*free_ports(1))
    url = f"http://127.0.0.1:{port}"
    if not is_free(port):
        raise DemoError(f"expected port {port} to be free: end what listens there, or choose another with --port")
    with ExitStack() as stack:
        broker = stack.enter_context(started(broker_command(home, folder, servers), folder / "broker.log"))
        wait_until(lambda: create_topics(servers), broker, f"the broker ({folder}/broker.log)", START_S)
        settings = {
            "STREAMLEARN_STATE": str(folder / "state"),
            "STREAMLEARN_SERVE__PORT": str(port),
            "STREAMLEARN_SOURCE__KAFKA__BOOTSTRAP_SERVERS": servers,
        }
        run = [*streamlearn(), "run", "--config", str(CONFIG)]
        daemon = stack.enter_context(started(run, folder / "daemon.log", settings))
        wait_until(lambda: answers(f"{url}/readyz"), daemon, f"the daemon ({folder}/daemon.log)", START_S)
        feed = [*streamlearn(), "feed", str(SAMPLE), "--topic", TOPICS[0], "--bootstrap-servers", servers]
        stack.enter_context(started(feed, folder / "feed.log"))
        yield url


def create_topics(servers: str) -> bool:
    """Whether the broker answers; the topics exist then."""
    try:
        with closing(KafkaAdminClient(bootstrap_servers=servers)) as admin:
            admin.create_topics({name: {"num_partitions": 1, "replication_factor": 1} for name in TOPICS})
    except KafkaError:
        return False
    return True


def broker_command(home: Path, folder: Path, servers: str) -> list[str]:
    """Format a broker's storage in `folder`, and return the command that starts it on loopback."""
    (controller,) = free_ports(1)
    settings = {
        "node.id": "1",
        "process.roles": "broker,controller",
        "listeners": f"PLAINTEXT://{servers},CONTROLLER://127.0.0.1:{controller}",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
        "log.dirs": str(folder / "kafka"),
        "offsets.topic.replication.factor": "1",
        "auto.create.topics.enable": "false",
    }
    properties = folder / "server.properties"
    properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    storage = [str(home / "bin" / "kafka-storage.sh"), "format", "--standalone", "-t", "c3RyZWFtbGVhcm5kZW1vAA"]
    subprocess.run([*storage, "-c", str(properties)], check=True, stdout=subprocess.DEVNULL)
    return [str(home / "bin" / "kafka-server-start.sh"), str(properties)]


@contextmanager
def started(
    command: Sequence[str], log: Path, settings: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, so that Ctrl-C reaches it only from here; ended by SIGTERM."""
    environment = {**os.environ, "LOG_DIR": str(log.parent), **(settings or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(STOP_S)


def wait_until(done: Callable[[], bool], process: subprocess.Popen[bytes], what: str, limit_s: float) -> None:
    """Wait until `done`.

    Raises:
        DemoError: the process ended before, or time is up.
    """
    deadline = time.monotonic() + limit_s
    while not done():
        if process.poll() is not None:
            raise DemoError(f"{what} ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise DemoError(f"{what} did not answer within {limit_s:g} s")
        time.sleep(0.5)


def show(url: str) -> None:
    """Print where the page is, and open it where there is a desktop."""
    print(f"streamlearn learns: {url}   (Ctrl-C ends it)", flush=True)
    if shutil.which("xdg-open") and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        subprocess.run(["xdg-open", url], check=False)


def streamlearn() -> list[str]:
    """The command line of this environment."""
    return [sys.executable, "-m", "streamlearn"]


def answers(url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5.0):
            return True
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def is_free(port: int) -> bool:
    """Whether the port can be bound on loopback."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return listener.connect_ex(("127.0.0.1", port)) != 0


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
