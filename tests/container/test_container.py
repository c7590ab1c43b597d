"""The container files are pinned, without secrets, and name files that exist; `make demo` learns without containers."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from streamlearn.settings import load
from tests.broker import free_ports, needed_kafka
from tests.docs.markdown import ROOT
from tests.end_to_end.process import START_AND_LEARN_S, STOP_S

FOLDER = ROOT / "configs" / "container"
CONTAINERFILE = (FOLDER / "Containerfile").read_text(encoding="utf-8")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]


def test_every_copied_file_exists() -> None:
    """In the root of the checkout, which is the build's context."""
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.MULTILINE) for name in line.split()
    ]
    assert len(copied) > 5
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_image_runs_as_an_ordinary_user_and_checks_its_health() -> None:
    """Nothing is installed after USER."""
    last = CONTAINERFILE.split("USER streamlearn")[1]
    assert "RUN" not in last
    assert "/livez" in last
    port = re.search(r"HEALTH_PORT=(\d+)", CONTAINERFILE)
    assert port is not None
    assert f":{port[1]}/livez" in last


def test_no_service_listens_beyond_this_machine() -> None:
    """All share the host's network, and every address in the file is loopback."""
    for service in SERVICES.values():
        assert service["network_mode"] == "host"
        assert "ports" not in service
        assert set(re.findall(r"\d+\.\d+\.\d+\.\d+", str(service))) <= {"127.0.0.1"}


def test_mounted_files_exist() -> None:
    """Those that are named relative to the compose file."""
    mounts = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    named = [mount for mount in mounts if mount.startswith(".")]
    assert named
    assert [mount for mount in named if not (FOLDER / mount).exists()] == []


def test_the_daemon_reads_the_broker_of_the_compose_file() -> None:
    """The address and the topics of the packaged configuration."""
    settings = load(ROOT / "configs" / "kafka-local.yaml")
    assert settings.source.kafka is not None
    advertised = SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert advertised == "PLAINTEXT://" + settings.source.kafka.bootstrap_servers.replace("localhost", "127.0.0.1")
    topics = [*settings.source.kafka.topics, str(settings.dead_letters.topic)]
    assert f"for topic in {' '.join(topics)};" in str(SERVICES["topics"]["command"])


DEMO = ROOT / "configs" / "container" / "demo.py"


def test_it_says_what_it_needs() -> None:
    """Neither an engine nor KAFKA_HOME."""
    environment = {**os.environ, "KAFKA_HOME": "/nonexistent"}
    command = [sys.executable, str(DEMO), "--no-containers"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "demo: expected a container engine with compose, or KAFKA_HOME to name an unpacked Apache Kafka 4\n"
    )


@pytest.mark.broker
def test_it_learns_the_sample_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    """With a snapshot, and without leaving a process behind."""
    (port,) = free_ports(1)
    folder = tmp_path / "demo"
    command = [sys.executable, str(DEMO), "--no-containers", "--port", str(port), "--folder", str(folder)]
    environment = {**os.environ, "KAFKA_HOME": str(needed_kafka()), "KAFKA_HEAP_OPTS": "-Xmx256m"}
    with (tmp_path / "out.txt").open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_AND_LEARN_S
        while _trained(port) == 0:
            said = (tmp_path / "out.txt").read_text()
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0
    finally:
        process.kill()  # it has ended, unless the test fails
        process.wait()
        left = _of_folder(folder)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert f"http://127.0.0.1:{port}" in (tmp_path / "out.txt").read_text()
    assert len(list((folder / "state" / "snapshots").glob("[0-9]*"))) > 1
    assert left == []


def _trained(port: int) -> int:
    try:
        return int(
            httpx2.get(f"http://127.0.0.1:{port}/v1/status", timeout=10.0).raise_for_status().json()["records_trained"]
        )
    except (httpx2.TransportError, httpx2.HTTPStatusError):
        return 0


def _of_folder(folder: Path) -> list[int]:
    """Processes whose command line names the folder, as the broker's does, or whose environment: the daemon's."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:  # it has ended, or belongs to somebody else
            continue
        if str(folder).encode() in text:
            found.append(int(process.name))
    return found
