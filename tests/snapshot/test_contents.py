"""The files of a snapshot folder: listed, read with a limit, and errors told apart."""

import errno
import os
from pathlib import Path

import pytest

from streamlearn.errors import SnapshotDamagedError, SnapshotError
from streamlearn.snapshot.files import hash_file, list_tree, read_bounded, reading


def test_folders_are_listed_deepest_first(tmp_path: Path) -> None:
    """Files are listed by relative name."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(b"1")
    (tmp_path / "y").write_bytes(b"22")
    files, folders = list_tree(tmp_path)
    assert files == {"a/b/x": tmp_path / "a" / "b" / "x", "y": tmp_path / "y"}
    assert folders == [tmp_path / "a" / "b", tmp_path / "a", tmp_path]
    assert hash_file(files["y"]).bytes == 2


def test_a_pipe_is_not_a_regular_file(tmp_path: Path) -> None:
    """It is refused without being opened, which would block."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SnapshotDamagedError, match="pipe: expected a regular file or a folder, found a device"):
        list_tree(tmp_path)


def test_a_file_over_the_limit_is_damaged(tmp_path: Path) -> None:
    """The limit itself is allowed."""
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bounded(tmp_path / "x", 5) == b"12345"
    with pytest.raises(SnapshotDamagedError, match="x: expected at most 4 bytes, found more"):
        read_bounded(tmp_path / "x", 4)


@pytest.mark.parametrize(
    ("code", "damaged"), [(errno.EIO, True), (errno.ENOENT, True), (errno.EACCES, False), (errno.EMFILE, False)]
)
def test_only_faults_of_the_files_are_damage(tmp_path: Path, code: int, damaged: bool) -> None:
    """Missing permissions and too many open files are faults of the process."""
    with pytest.raises(SnapshotError) as caught, reading(tmp_path):
        raise OSError(code, os.strerror(code))
    assert isinstance(caught.value, SnapshotDamagedError) == damaged
