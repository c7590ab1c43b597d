"""One daemon per state folder, across processes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamlearn.errors import SnapshotError, StateLockedError
from streamlearn.snapshot.files import StateLock

HOLDER = """
import sys
from pathlib import Path
from streamlearn.snapshot.files import StateLock
lock = StateLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_error_of_a_second_daemon_names_the_holder(tmp_path: Path) -> None:
    """The lock ends with its holder, even after kill -9; the remaining file blocks nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StateLockedError, match=f"locked by process {holder.pid}: stop"):
            StateLock(tmp_path)
        holder.kill()
        holder.wait()
        with StateLock(tmp_path):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_one_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    with StateLock(tmp_path), pytest.raises(StateLockedError, match=f"process {os.getpid()}"):
        StateLock(tmp_path)
    lock = StateLock(tmp_path)
    lock.release()
    lock.release()
    StateLock(tmp_path).release()


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(SnapshotError, match=r"state/lock: must be writable"):
        StateLock(tmp_path / "state")


def test_a_full_disk_admits_a_daemon_whose_lock_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the PID cannot be written; what else needs room says so."""
    StateLock(tmp_path).release()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        lock = StateLock(tmp_path)
    with lock, pytest.raises(StateLockedError, match=r"process \(unknown\): stop"):
        StateLock(tmp_path)


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(SnapshotError, match="must be writable"):
        StateLock(tmp_path)
    assert (tmp_path / "precious").read_text() == "data"
