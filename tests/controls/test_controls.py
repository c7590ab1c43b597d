"""The table of controls, the audit log and the control file."""

import os
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer

from streamlearn import controls as control_file
from streamlearn.cli.main import app
from streamlearn.controls import (
    AUDIT_FILE_NAME,
    VERBS,
    AuditLog,
    Control,
    ControlFile,
    ControlState,
    Requester,
    Result,
    Scope,
)
from streamlearn.errors import SnapshotError, UsageError
from streamlearn.regimes.regimes import Regimes
from streamlearn.stream.position import OffsetRange, TopicPartition

ANN = Requester(user="ann@box")


def lines(folder: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in (folder / AUDIT_FILE_NAME).read_bytes().splitlines()]


def test_a_control_has_a_line_before_and_a_line_after(tmp_path: Path) -> None:
    """Both have one id; the first is durable before anything changes."""
    with AuditLog(tmp_path).applying(Control.snapshot("rollback", "00000042", skip_records=("0..9",)), ANN):
        (asked,) = lines(tmp_path)
    asked, done = lines(tmp_path)
    assert (asked["result"], done["result"]) == ("asked", "done")
    assert asked["id"] == done["id"]
    assert done["arguments"] == {"snapshot": "00000042", "skip_records": ["0..9"]}
    assert done["who"] == {"user": "ann@box"}


@pytest.mark.parametrize(
    ("error", "result"), [(UsageError("no"), "refused"), (SnapshotError("full"), "failed"), (KeyError("x"), "failed")]
)
def test_an_error_is_an_outcome(tmp_path: Path, error: Exception, result: str) -> None:
    with pytest.raises(type(error)), AuditLog(tmp_path).applying(Control.run("pause"), ANN):
        raise error
    assert [line["result"] for line in lines(tmp_path)] == ["asked", result]


def test_nothing_is_carried_out_without_its_line(tmp_path: Path) -> None:
    """The folder cannot be written, so the control is not begun."""
    entered = []
    with pytest.raises(SnapshotError, match="No control is applied without its line"):  # noqa: SIM117
        with AuditLog(tmp_path / "missing").applying(Control.run("pause"), ANN):
            entered.append(True)
    assert not entered


STATE = ControlState(True, frozenset({"00000042"}), (OffsetRange(TopicPartition("orders", 1), 5, 9),), "00000042")


def test_the_state_round_trips(tmp_path: Path) -> None:
    assert control_file.read(tmp_path) == ControlState()
    ControlFile(tmp_path).write(STATE)
    assert ControlFile(tmp_path).state == STATE


def test_every_changed_byte_is_detected(tmp_path: Path) -> None:
    """An offset that was altered would skip the wrong records."""
    ControlFile(tmp_path).write(STATE)
    path = tmp_path / control_file.CONTROL_FILE_NAME
    data = path.read_bytes()
    for index in range(len(data) - 1):  # the last one is the newline
        path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        with pytest.raises(SnapshotError, match=r"restore the file from a backup|version"):
            control_file.read(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    """Its meaning is not known, and the message says what to do."""
    body = orjson.loads(STATE.to_bytes())
    del body["crc32"]
    body["version"] = 2
    from streamlearn.controls import _checksum  # noqa: PLC0415

    (tmp_path / control_file.CONTROL_FILE_NAME).write_bytes(orjson.dumps({**body, "crc32": _checksum(body)}))
    with pytest.raises(SnapshotError, match="reads version 1, found version 2: run the release that wrote it"):
        ControlFile(tmp_path)


def test_every_verb_has_a_route_a_command_and_whoever_applies_it() -> None:
    """`VERBS` is the only place that lists them; arguments keep their order, which methods rely on."""
    groups: Any = typer.main.get_command(app)
    names = {Scope.RUN: groups.commands, Scope.SNAPSHOT: groups.commands["snapshots"].commands}
    names[Scope.REGIME] = groups.commands["regimes"].commands
    for verb in VERBS.values():
        assert verb.name in names[verb.scope]
        assert verb.scope is not Scope.REGIME or callable(getattr(Regimes, verb.name))
    assert Control.regime("rename", 3, new_name="a b").path == "/v1/regimes/3/rename"
    assert Control.regime("rename", 3, new_name="a b").body == {"name": "a b"}
    assert Control.snapshot("rollback", "../x").path == "/v1/snapshots/..%2Fx/rollback"
    assert Control.snapshot("rollback", "../x").arguments == {"snapshot": "../x", "skip_records": ()}


def test_neither_a_full_disk_nor_a_torn_line_spoils_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is taken back."""
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 1)
    with pytest.raises(SnapshotError, match="No space left on device"):
        AuditLog(tmp_path).write("pause", {}, ANN, Result.REFUSED)
    assert (tmp_path / AUDIT_FILE_NAME).read_bytes() == b""
    monkeypatch.undo()
    (tmp_path / AUDIT_FILE_NAME).write_bytes(b'{"at":"2026-')  # a power loss may leave half a line
    with AuditLog(tmp_path).applying(Control.run("pause"), ANN) as outcome:
        outcome.unchanged = True
    _, *whole = (tmp_path / AUDIT_FILE_NAME).read_bytes().splitlines()
    assert [orjson.loads(line)["result"] for line in whole] == ["asked", "unchanged"]
