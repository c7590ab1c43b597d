"""Files of a snapshot: every damage is found, and a failed operation leaves the old snapshot."""

import errno
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from streamlearn.errors import SnapshotDamagedError, SnapshotError
from streamlearn.snapshot.files import Files, is_disk_full, list_tree, read_bounded, reading
from streamlearn.snapshot.manifest import Manifest
from streamlearn.snapshot.parts import adapter_part, state_part
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.position import Position, TopicPartition

from .kit import assert_is, draft, save, tensors


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


@pytest.mark.parametrize(
    "file", ["state.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "manifest.json"]
)
def test_flips_and_truncations_of_every_file_are_found(store: SnapshotStore, file: str) -> None:
    """A hundred seeded mutations per file, on disk, checked in the same way as at a start."""
    draw = random.Random(file)
    path = store.folder / NAME / file
    whole = path.read_bytes()
    for _ in range(100):
        mutated = bytearray(whole)
        mutated[draw.randrange(len(whole))] ^= draw.randrange(1, 256)
        path.write_bytes(draw.choice([bytes(mutated), whole[: draw.randrange(len(whole))], whole + b"\0"]))
        with pytest.raises(SnapshotDamagedError, match=path.name):
            store.verify(NAME)
    path.write_bytes(whole)
    store.verify(NAME)


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
def test_a_missing_file_is_found(store: SnapshotStore, file: str) -> None:
    (store.folder / NAME / file).unlink()
    with pytest.raises(SnapshotDamagedError, match=Path(file).name):
        store.verify(NAME)
    assert_is(store.newest(), 1)


def test_an_extra_file_is_found(store: SnapshotStore) -> None:
    (store.folder / NAME / "adapter" / "extra.bin").write_bytes(b"")
    with pytest.raises(SnapshotDamagedError, match=r"unexpected file adapter/extra\.bin"):
        store.verify(NAME)


@pytest.mark.parametrize("file", ["state.safetensors", "adapter", "manifest.json", "."])
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


class Broken(Files):
    """Fails at the n-th operation, or from the n-th on; a failed write leaves the first half of the file."""

    def __init__(self, nth: int, code: int, *, permanently: bool) -> None:
        self.left = nth
        self.code = code
        self.permanently = permanently
        self.after_failed_sync: list[Path] = []
        self._failed_sync = False

    @property
    def failed(self) -> bool:
        """Whether an operation has failed."""
        return self.left <= 0

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0 or (self.left < 0 and self.permanently):
            raise OSError(self.code, "made to fail")

    def make_folder(self, path: Path) -> None:
        """Count it, then do it."""
        self._count()
        super().make_folder(path)

    def write(self, path: Path, data: bytes) -> None:
        """Count it, then do it."""
        try:
            self._count()
        except OSError:
            path.write_bytes(data[: len(data) // 2])
            raise
        super().write(path, data)

    def sync(self, path: Path) -> None:
        """Count it, then do it."""
        if self._failed_sync:
            self.after_failed_sync.append(path)
        try:
            self._count()
        except OSError:
            self._failed_sync = True
            raise

    def rename(self, old: Path, new: Path) -> None:
        """Count it, then do it."""
        self._count()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        """Count it, then do it."""
        self._count()
        super().remove(path)


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
        disk = Broken(nth, errno.EIO, permanently=permanently)
        failure = attempt(SnapshotStore(healthy.folder, keep=2, files=disk), step, position)
        found = offset(healthy)
        assert found == (4 if failure else new) or (permanently and found == new)
        assert {path.name for path in healthy.folder.iterdir()} <= {"00000001", "00000002"}
        assert disk.after_failed_sync == []
        save(healthy, step, position=position)
        assert offset(healthy) == new
        failures += failure is not None
        if not disk.failed:
            break
    assert failures >= 10


def attempt(store: SnapshotStore, step: int, position: Position) -> SnapshotError | None:
    """Save, and return the error if it failed."""
    try:
        save(store, step, position=position)
    except SnapshotError as error:
        return error
    return None


def test_the_first_snapshot_may_fail_too(tmp_path: Path) -> None:
    """Then there is none, and the next save creates it."""
    for nth in itertools.count(1):
        disk = Broken(nth, errno.ENOSPC, permanently=False)
        store = SnapshotStore(tmp_path / str(nth) / "snapshots", keep=2, files=disk)
        failure = attempt(store, 1, draft(1).position)
        assert offset(SnapshotStore(store.folder, keep=2)) == (None if failure else 4)
        healed = SnapshotStore(store.folder, keep=2)
        save(healed, 1)
        assert_is(healed.newest(), 1)
        if not disk.failed:
            break


def disk_full(_: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def disk_full_in_safetensors(_: Path) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("write_adapter", [disk_full, disk_full_in_safetensors])
def test_a_full_disk_in_the_adapter_is_a_snapshot_error(tmp_path: Path, write_adapter: Callable[[Path], None]) -> None:
    store = SnapshotStore(tmp_path, keep=2)
    save(store, 1)
    with pytest.raises(SnapshotError, match=r"00000002 could not be written.*No space left.*untouched") as raised:
        store.save(draft(2), [adapter_part(write_adapter), state_part(tensors(2))])
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
