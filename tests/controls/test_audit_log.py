"""Who asked for what, when, and what became of it."""

from pathlib import Path

import orjson
import pytest

from streamlearn.controls import AUDIT_FILE_NAME, AuditLog, Control, Requester, Result
from streamlearn.errors import SnapshotError, UsageError
from streamlearn.snapshot.files import Files

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


def test_what_was_so_already_is_unchanged(tmp_path: Path) -> None:
    with AuditLog(tmp_path).applying(Control.run("pause"), ANN) as outcome:
        outcome.unchanged = True
    assert lines(tmp_path)[1]["result"] == "unchanged"


def test_nothing_is_carried_out_without_its_line(tmp_path: Path) -> None:
    """The folder cannot be written, so the control is not begun."""
    entered = []
    with pytest.raises(SnapshotError, match="No control is applied without its line"):  # noqa: SIM117
        with AuditLog(tmp_path / "missing").applying(Control.run("pause"), ANN):
            entered.append(True)
    assert not entered


def test_a_torn_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    """A power loss may leave half a line."""
    (tmp_path / AUDIT_FILE_NAME).write_bytes(b'{"at":"2026-')
    AuditLog(tmp_path).write("pause", {}, ANN, Result.REFUSED)
    assert orjson.loads((tmp_path / AUDIT_FILE_NAME).read_bytes().splitlines()[1])["control"] == "pause"


def test_the_first_line_makes_the_name_durable(tmp_path: Path) -> None:
    synced: list[Path] = []

    class Noting(Files):
        def sync(self, path: Path) -> None:
            synced.append(path)

    for _ in range(2):
        AuditLog(tmp_path, Noting()).write("pause", {}, ANN, Result.REFUSED)
    assert synced == [tmp_path]
