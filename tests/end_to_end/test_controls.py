"""Controls of the process, killed with SIGKILL right after each answer."""

from pathlib import Path
from typing import Any

import httpx2
import orjson
import yaml
from structlog.testing import capture_logs
from typer.testing import CliRunner

from streamlearn.cli.main import app
from tests.docs.place import free_port
from tests.doubles import tiny_backbone
from tests.end_to_end.process import DaemonProcess, ForkedDaemon
from tests.learners import differences

BAD = range(48, 60)
LINES = 80


def lines(*, bad: bool) -> bytes:
    """Records to learn, as JSONL, with or without those that should not be there."""
    good = [{"prompt": f"say {i}", "completion": f" {i * i}"} for i in range(LINES)]
    rows = [*good[: BAD.start], *({"prompt": f"say {i}", "completion": " rubbish"} for i in BAD), *good[BAD.start :]]
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in (rows if bad else good))


def daemon_over(folder: Path, backbone: Path, *, bad: bool = False, **sections: Any) -> DaemonProcess:
    """A daemon that waits for more records after the last line, and trains what it has after a short linger."""
    folder.mkdir()
    (folder / "stream.jsonl").write_bytes(lines(bad=bad))
    return ForkedDaemon(
        folder / "daemon",
        {
            "source": {"jsonl": {"path": str(folder / "stream.jsonl"), "follow": True}},
            "stream": {"max_tokens": 64, "batch_tokens": 256, "batch_records": 4, "linger_s": None},
            "backbone": {"model": str(backbone), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "learner": {"lr": 1e-2},
            "shift": {"lookahead_records": 4},
            "snapshot": {"every_records": 20, "keep": 9},
            "serve": {"port": free_port()},
            "log": {"style": "json"},
            **sections,
        },
    )


def command(daemon: DaemonProcess, *arguments: str) -> str:
    """What a command on the daemon's configuration prints."""
    with capture_logs():
        done = CliRunner().invoke(app, [*arguments, "--config", str(daemon.config)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def client_of(daemon: DaemonProcess) -> httpx2.Client:
    port = yaml.safe_load(daemon.config.read_text())["serve"]["port"]
    headers = {"authorization": f"Bearer {(daemon.state / 'http.token').read_text().strip()}"}
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers)


def status(daemon: DaemonProcess) -> dict[str, Any]:
    """The status; empty while nothing answers."""
    try:
        with client_of(daemon) as client:
            return dict(client.get("/v1/status").json())
    except (OSError, httpx2.TransportError):
        return {}


def wait_for(daemon: DaemonProcess, **wanted: Any) -> None:
    daemon.wait_until(lambda: wanted.items() <= status(daemon).items(), f"the status has {wanted}")


def test_every_control_survives_a_kill_right_after_its_answer(tmp_path: Path, daemons: list[DaemonProcess]) -> None:
    """Paused, pinned, rolled back without the bad records: the end is bit-equal to a run that never had them."""
    (tmp_path / "backbone").mkdir()
    backbone = tiny_backbone(tmp_path / "backbone")
    clean, daemon = (daemon_over(tmp_path / name, backbone, bad=name == "bad") for name in ("clean", "bad"))
    daemons += [clean, daemon]

    clean.start()
    daemon.start()
    wait_for(daemon, phase="idle")
    assert command(daemon, "pause") == "paused: no step is taken and no record is read until `streamlearn resume`\n"
    daemon.kill()

    daemon.start()
    wait_for(daemon, phase="paused", ready=True)
    with client_of(daemon) as client:
        assert client.get("/readyz").json()["phase"] == "paused"
        assert 'streamlearn_phase{phase="paused"} 1.0' in client.get("/metrics").text
        assert client.post("/v1/snapshots/00000005/pin", headers={"authorization": "no"}).status_code == 401
        assert client.post("/v1/snapshots/00000005/pin").json()["pinned"] == ["00000005"]
    daemon.kill()

    assert "00000005  pinned" in command(daemon, "snapshots", "list").replace("│", "")
    daemon.start()
    wait_for(daemon, phase="paused", ready=True)
    skipped = f"{BAD.start}..{BAD.stop - 1}"
    assert "rolled back to 00000010" in command(daemon, "snapshots", "rollback", "00000010", "--skip-records", skipped)
    daemon.kill()

    assert command(daemon, "resume") == "resumed\n"  # without a daemon
    daemon.start()
    wait_for(daemon, phase="idle", records_dead_lettered=len(BAD))
    wait_for(clean, phase="idle")
    assert status(daemon)["dead_letters"]["skipped"] == len(BAD)
    assert [process.terminate() for process in (daemon, clean)] == [0, 0]
    assert differences(daemon.newest().tensors(), clean.newest().tensors()) == []

    audit = [orjson.loads(line) for line in (daemon.state / "audit.jsonl").read_bytes().splitlines()]
    assert [(line["control"], line["result"]) for line in audit] == [
        (verb, result) for verb in ("pause", "pin", "rollback", "resume") for result in ("asked", "done")
    ]
    assert [line["who"].get("token") for line in audit] == [True, True, True, True, True, True, None, None]
    assert audit[0]["who"]["agent"].startswith("streamlearn/")
    assert "@" in audit[-1]["who"]["user"]


def test_every_change_of_a_regime_survives_a_kill_right_after_its_answer(
    tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """Each is in the newest snapshot when it is answered, and a start after SIGKILL goes on from there."""
    (tmp_path / "backbone").mkdir()
    daemon = daemon_over(
        tmp_path / "run",
        tiny_backbone(tmp_path / "backbone"),
        publish={"folder": str(tmp_path / "published")},
        holdout={"every_records": 4},
    )
    daemons.append(daemon)
    named = {"name": "squares"}
    lives: tuple[tuple[tuple[str, dict[str, Any], dict[str, Any]], ...], ...] = (
        (
            ("freeze", {}, {"frozen": True, "name": "", "approved": False}),
            ("rename", named, {"frozen": True, "name": "squares", "approved": False}),
            ("approve", {}, {"frozen": True, "name": "squares", "approved": True}),
        ),
        (
            ("unfreeze", {}, {"frozen": False, "name": "squares", "approved": True}),
            ("drop", {}, {}),
        ),
    )
    for life, before in zip(lives, ({"frozen": False, "name": ""}, {"frozen": True, "name": "squares"}), strict=True):
        daemon.start()
        wait_for(daemon, phase="idle", ready=True)
        assert shown(daemon) == before
        with client_of(daemon) as client:
            for control, body, after in life:
                answer = client.post(f"/v1/regimes/1/{control}", json=body or None)
                assert (answer.status_code, durable(daemon)) == (200, after)
        daemon.kill()
        assert durable(daemon) == life[-1][2]
    daemon.start()
    wait_for(daemon, phase="idle", ready=True)
    assert shown(daemon) == {}
    audit = [orjson.loads(line) for line in (daemon.state / "audit.jsonl").read_bytes().splitlines()]
    controls = [control for life in lives for control, _, _ in life]
    assert [(line["control"], line["result"]) for line in audit] == [
        (control, result) for control in controls for result in ("asked", "done")
    ]


def shown(daemon: DaemonProcess) -> dict[str, Any]:
    """What `/v1/regimes` says about regime 1; empty if there is none."""
    with client_of(daemon) as client:
        regimes = client.get("/v1/regimes").json()["regimes"]
    return {name: regimes[0][name] for name in ("frozen", "name")} if regimes else {}


def durable(daemon: DaemonProcess) -> dict[str, Any]:
    """What the newest snapshot holds about regime 1; empty if it holds none."""
    regimes = daemon.newest().regimes().regimes.values()
    regime = next((regime for regime in regimes if regime.number == 1), None)
    if regime is None:
        return {}
    return {"frozen": regime.is_frozen, "name": regime.name, "approved": regime.approved_at is not None}
