"""The unit as systemd reads it, and the daemon under what the unit forbids."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import yaml

from streamlearn.settings import load
from tests.doubles import tiny_backbone
from tests.forked import ForkedProcess, run_command

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "streamlearn.service"
TORCHRUN_UNIT = ROOT / "systemd" / "streamlearn-torchrun.service"
MOST_EXPOSED = 15  # tenths: systemd's own scale goes from 0 to 10
STEPS_S = 120.0

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture(scope="module")
def unit() -> dict[str, list[str]]:
    return service_of(UNIT)


def service_of(path: Path) -> dict[str, list[str]]:
    """Every key of [Service], with its values in order."""
    values: dict[str, list[str]] = {}
    section = ""
    for line in path.read_text().splitlines():
        section = line if line.startswith("[") else section
        if section == "[Service]" and "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            values.setdefault(key, []).append(value)
    return values


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A daemon that follows a file, so that it stays when it has learned what is there."""
    records = tmp_path / "records.jsonl"
    row = orjson.dumps({"prompt": "the quick brown fox", "completion": " jumps over the lazy dog"})
    records.write_bytes((row + b"\n") * 64)
    backbone = tmp_path / "backbone"
    backbone.mkdir()
    values = {
        "state": str(tmp_path / "state"),
        "source": {"jsonl": {"path": str(records), "follow": True}},
        "stream": {"max_tokens": 64, "batch_tokens": 256, "batch_records": 8},
        "backbone": {"model": str(tiny_backbone(backbone)), "dtype": "float32"},
        "snapshot": {"every_records": 16},
        "serve": {"port": 0},
        "log": {"style": "json"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@needs_systemd
def test_exposure_is_low() -> None:
    """By systemd's own reckoning; 9.6 without a sandbox."""
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", str(UNIT)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    [exposure] = re.findall(r"Overall exposure level for streamlearn.service: ([0-9.]+)", told.stdout)
    assert float(exposure) <= MOST_EXPOSED / 10


@needs_systemd
@pytest.mark.parametrize("path", [UNIT, TORCHRUN_UNIT], ids=lambda path: path.stem)
def test_systemd_understands_every_line(tmp_path: Path, path: Path) -> None:
    """The command aside, which is not installed here."""
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={shutil.which('true')}", path.read_text()))
    told = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    ours = [line for line in told.stderr.splitlines() if path.name in line]
    assert ours == []


def test_the_drop_in_for_publishing_lets_other_users_read(unit: dict[str, list[str]]) -> None:
    """The unit itself does not."""
    drop_in = service_of(UNIT.with_name("publish.conf"))
    assert int(unit["UMask"][0], 8) & 0o044 == 0o044
    assert int(drop_in["UMask"][0], 8) & 0o044 == 0
    assert unit["StateDirectoryMode"] == ["0700"]


def test_several_processes_have_the_same_sandbox(unit: dict[str, list[str]]) -> None:
    """Only what torchrun needs differs."""
    of_torchrun = service_of(TORCHRUN_UNIT)
    different = {key for key in unit.keys() | of_torchrun.keys() if unit.get(key) != of_torchrun.get(key)}
    restarts = {"Restart", "RestartPreventExitStatus", "SuccessExitStatus"}
    assert different == {"ExecStart", "Environment", "KillMode", "NotifyAccess", "TasksMax", *restarts}
    [command] = of_torchrun["ExecStart"]
    assert command.split()[-4:] == ["streamlearn", "run", "--config", "/etc/streamlearn/config.yaml"]


def test_the_unit_and_the_production_configuration_agree(unit: dict[str, list[str]]) -> None:
    """State folder, credential and what must never be restarted."""
    settings = load(ROOT / "configs" / "prod.yaml")
    assert settings.source.kafka is not None
    [state] = unit["StateDirectory"]
    assert str(settings.state) == f"/var/lib/{state}"
    [credential] = unit["LoadCredential"]
    name = credential.partition(":")[0]
    assert str(settings.source.kafka.sasl_plain_password_file) == f"/run/credentials/{UNIT.name}/{name}"
    assert unit["RestartPreventExitStatus"] == ["64 70 78"]
    [command] = unit["ExecStart"]
    program, *arguments = command.split()
    assert program == "/opt/streamlearn/bin/streamlearn"
    assert arguments == ["run", "--config", "/etc/streamlearn/config.yaml"]


@pytest.mark.parametrize("path", [UNIT, TORCHRUN_UNIT], ids=lambda path: path.stem)
def test_an_outage_never_leaves_the_unit_failed(path: Path) -> None:
    """However often a start fails because no broker answers, there is another one."""
    lines = path.read_text().splitlines()
    assert "StartLimitIntervalSec=0" in lines[lines.index("[Unit]") : lines.index("[Service]")]
    unit = service_of(path)
    assert unit["Restart"][0] in ("on-failure", "always")
    assert not {"74", "75", "1"} & set(unit["RestartPreventExitStatus"][0].split())


def members(name: str) -> set[str]:
    """The system calls of one of systemd's sets."""
    told = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
    words = [line.strip() for line in told.stdout.splitlines()[1:]]
    found: set[str] = set()
    for word in words:
        if word and not word.startswith("#"):
            found |= members(word) if word.startswith("@") else {word}
    return found


@needs_systemd
@needs_strace
def test_it_learns_under_the_system_call_filter(unit: dict[str, list[str]], config: Path, tmp_path: Path) -> None:
    """Every call that the unit forbids is refused with EPERM; some are tried, and it learns all the same."""
    allowed, forbidden = unit["SystemCallFilter"]
    names = members("@known") - members(allowed)
    for name in forbidden.removeprefix("~").split():
        names |= members(name)
    assert unit["SystemCallErrorNumber"] == ["EPERM"]
    listed = ",".join(f"?{name}" for name in sorted(names))
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", str(trace)]
    inject = ["-e", f"trace={listed}", "-e", f"inject={listed}:error=EPERM"]
    config.write_text(config.read_text().replace("follow: true", "follow: false"))
    run = [sys.executable, "-m", "streamlearn", "run", "--config", str(config)]
    told = subprocess.run([*strace, *inject, *run], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    assert sorted((tmp_path / "state" / "snapshots").iterdir())[-1].name == "00000008"
    assert "(INJECTED)" in trace.read_text(), "nothing was refused: the test would pass without a filter too"


def test_the_manager_hears_of_the_whole_life(config: Path, tmp_path: Path) -> None:
    """Ready when loaded, alive while it waits, 0 on SIGTERM."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(STEPS_S)
    heard: list[str] = []

    def wait_for(line: str, times: int = 1) -> None:
        deadline = time.monotonic() + STEPS_S
        while sum(message.startswith(line) for message in heard) < times:
            assert time.monotonic() < deadline, heard
            heard.extend(listener.recv(4096).decode().splitlines())

    environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
    command = [sys.executable, "-m", "streamlearn", "run", "--config", str(config)]
    daemon = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with listener, daemon:
        wait_for("READY=1")
        assert heard[0].startswith("STATUS=starting")
        wait_for("STATUS=idle: step 6")  # the rest waits for more: so many records are held back (shift)
        wait_for("WATCHDOG=1", times=heard.count("WATCHDOG=1") + 3)
        daemon.send_signal(signal.SIGTERM)
        _, errors = daemon.communicate(timeout=STEPS_S)
        heard += listener.recv(4096).decode().splitlines()
    assert daemon.returncode == 0, errors
    assert "STOPPING=1" in heard
    assert heard.count("READY=1") == 1


def test_the_watchdogs_abort_leaves_the_stack_of_every_thread(config: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    daemon = ForkedProcess(run_command, ["run", "--config", str(config)], stderr=log)
    deadline = time.monotonic() + STEPS_S
    while not (tmp_path / "state" / "journal.jsonl").exists():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    daemon.send_signal(signal.SIGABRT)
    assert daemon.wait(STEPS_S) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in log.read_text()
    assert "streamlearn/" in log.read_text()
