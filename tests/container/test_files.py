"""The Containerfile and the compose file: pinned, without secrets, and about files that exist."""

import re
from typing import Any

import pytest
import yaml

from streamlearn.settings import load
from tests.docs.markdown import ROOT

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


def test_dependencies_are_installed_before_the_code() -> None:
    """A change of the code rebuilds the last layer only; all of them are pinned."""
    order = [CONTAINERFILE.index(line) for line in ("COPY constraints.txt", "COPY pyproject.toml", "COPY streamlearn ")]
    assert order == sorted(order)
    assert "PIP_CONSTRAINT=/src/constraints.txt" in CONTAINERFILE


def test_the_image_runs_as_an_ordinary_user_and_checks_its_health() -> None:
    """Nothing is installed after USER."""
    last = CONTAINERFILE.split("USER streamlearn")[1]
    assert "RUN" not in last
    assert "/livez" in last
    port = re.search(r"HEALTH_PORT=(\d+)", CONTAINERFILE)
    assert port is not None
    assert f":{port[1]}/livez" in last


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_listens_beyond_this_machine(name: str) -> None:
    """All share the host's network, and every address in the file is loopback."""
    service = SERVICES[name]
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
