"""Files of a snapshot: every damage is found, and a failed operation leaves the old snapshot."""

import errno
import itertools
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from streamlearn.errors import SnapshotDamagedError, SnapshotError
from streamlearn.snapshot.files import is_disk_full, list_tree, read_bounded, reading
from streamlearn.snapshot.manifest import Manifest
from streamlearn.snapshot.parts import adapter_part, state_part
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.position import Position, TopicPartition

from .kit import FailingFiles, assert_is, draft, save, tensors


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


NAME = "00000002"


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    store = SnapshotStore(tmp_path / "snapshots", keep=2)
    save(store, 1)
    save(store, 2)
    return store


def test_every_bit_flip_of_a_manifest_is_found(store: SnapshotStore) -> None:
    """Every bit of every byte, including whitespace and the digits of the seal."""
    data = bytearray((store.folder / NAME / "manifest.json").read_bytes())
    Manifest.from_bytes(bytes(data), where="m")
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            with pytest.raises(SnapshotDamagedError):
                Manifest.from_bytes(bytes(data), where="m")
            data[index] ^= 1 << bit


@pytest.mark.parametrize("file", ["state.safetensors", "."])
def test_a_link_is_found_even_to_the_right_content(store: SnapshotStore, file: str, tmp_path: Path) -> None:
    path = store.folder / NAME / file
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotDamagedError):
        store.verify(NAME)
    assert_is(store.newest(), 1)


def test_a_snapshot_under_another_steps_name_is_found(store: SnapshotStore) -> None:
    (store.folder / NAME).rename(store.folder / "00000009")
    with pytest.raises(SnapshotDamagedError, match="expected the snapshot of step 00000009, found step 2"):
        store.verify("00000009")
    assert_is(store.newest(), 1)


def offset(store: SnapshotStore) -> int | None:
    """The offset of the newest snapshot, after comparing every file of it."""
    snapshot = store.newest()
    return None if snapshot is None else snapshot.manifest.position[TopicPartition("orders", 0)]


@pytest.mark.parametrize("permanently", [False, True])
@pytest.mark.parametrize(("step", "new"), [(2, 8), (1, 99)])
def test_a_failure_anywhere_leaves_the_old_snapshot(tmp_path: Path, step: int, new: int, permanently: bool) -> None:
    """At a new step, and at a later position of the same step.

    If every operation from the last fsync on fails, the rename cannot be undone either: then the new snapshot is
    found, complete.
    """
    position = Position({TopicPartition("orders", 0): new})
    failures = 0
    for nth in itertools.count(1):
        healthy = SnapshotStore(tmp_path / str(nth), keep=2)
        save(healthy, 1)
        disk = FailingFiles(nth, errno.EIO, permanently=permanently)
        failure = attempt(SnapshotStore(healthy.folder, keep=2, files=disk), step, position)
        newest = offset(healthy)
        assert newest == (4 if failure else new) or (permanently and newest == new)
        assert {path.name for path in healthy.folder.iterdir()} <= {"00000001", "00000002"}
        assert disk.after_failed_sync == []
        save(healthy, step, position=position)
        assert offset(healthy) == new
        failures += failure is not None
        if disk.left > 0:
            break
    assert failures >= 10


def attempt(store: SnapshotStore, step: int, position: Position) -> SnapshotError | None:
    """Save, and return the error if it failed."""
    try:
        save(store, step, position=position)
    except SnapshotError as error:
        return error
    return None


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_in_the_adapter_is_a_snapshot_error(tmp_path: Path, error: Exception) -> None:
    def full(_: Path) -> None:
        raise error

    store = SnapshotStore(tmp_path, keep=2)
    save(store, 1)
    with pytest.raises(SnapshotError, match=r"00000002 could not be written.*No space left.*untouched") as raised:
        store.save(draft(2), [adapter_part(full), state_part(tensors(2))])
    assert is_disk_full(raised.value)
    assert [path.name for path in store.folder.iterdir()] == ["00000001"]


def test_a_bug_in_the_adapter_is_not_a_snapshot_error(tmp_path: Path) -> None:
    """A programming error is raised unchanged, and leaves no files."""

    def buggy(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_bytes(b"x")
        raise KeyError("lora_A")

    store = SnapshotStore(tmp_path, keep=2)
    save(store, 1)
    with pytest.raises(KeyError):
        store.save(draft(2), [adapter_part(buggy), state_part(tensors(2))])
    assert [path.name for path in store.folder.iterdir()] == ["00000001"]


def test_a_device_or_link_in_the_adapter_is_refused_at_once(tmp_path: Path) -> None:
    """A snapshot that `verify` would refuse is not published."""

    def linked(folder: Path) -> None:
        folder.mkdir()
        (folder / "link").symlink_to(tmp_path)

    store = SnapshotStore(tmp_path / "snapshots", keep=2)
    with pytest.raises(SnapshotError, match=r"link: expected a regular file or a folder, found a symbolic link"):
        store.save(draft(2), [adapter_part(linked), state_part(tensors(2))])
    assert store.newest() is None
