"""What has not changed is linked from an earlier snapshot, and never at the price of both newest snapshots."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamlearn.errors import SnapshotError
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.parts import SnapshotPart, adapter_part, optimizer_part, state_part
from streamlearn.snapshot.store import SnapshotStore

from .kit import draft, tensors


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", keep=2)


def write(content: int) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "weights").write_bytes(bytes([content]) * 1000)
        (folder / "config").write_bytes(b"{}")

    return fill


def save(store: SnapshotStore, step: int, revision: int | None = 0, content: int = 0) -> None:
    """A snapshot with an adapter, and its optimizer state, of this revision and content."""
    parts: list[SnapshotPart] = [
        state_part(tensors(step)),
        adapter_part(write(content), name="regime1", revision=revision),
    ]
    if revision is not None:
        parts.append(
            optimizer_part("regime1", lambda: {"moment": torch.full((300,), float(content))}, revision=revision)
        )
    store.save(draft(step), parts)


def inode(store: SnapshotStore, step: int, name: str = "adapter/regime1/inner/weights") -> int:
    return (store.folder / f"{step:08d}" / name).stat().st_ino


def test_an_unchanged_part_is_linked_from_the_snapshot_before_the_newest(store: SnapshotStore) -> None:
    """Two copies take turns, so the two newest snapshots never share one."""
    written = []
    for step in range(1, 6):
        save(store, step)
        written.append(store.new_bytes)
        store.prune()
    assert inode(store, 4) != inode(store, 5)
    for step in (4, 5):
        assert (store.folder / f"{step:08d}" / "adapter/regime1/inner/weights").stat().st_nlink == 1  # 1 to 3 are gone
        store.verify(f"{step:08d}")
    assert written[0] == written[1]
    moments = (store.folder / "00000005/optimizer/regime1.safetensors").stat().st_size
    assert set(written[2:]) == {written[0] - 1000 - len(b"{}") - moments}


def test_all_files_of_a_part_are_linked(store: SnapshotStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    for name in ("adapter/regime1/config", "adapter/regime1/inner/weights", "optimizer/regime1.safetensors"):
        assert inode(store, 3, name) == inode(store, 1, name) != inode(store, 2, name)
    assert inode(store, 3, "state.safetensors") != inode(store, 1, "state.safetensors")


@pytest.mark.parametrize("revision", [1, None])
def test_a_changed_part_is_written(store: SnapshotStore, revision: int | None) -> None:
    """And one that has no revision, even if its content is the same."""
    for step in (1, 2):
        save(store, step, 0 if revision else None)
    save(store, 3, revision, content=1)
    assert len({inode(store, step) for step in (1, 2, 3)}) == 3
    found = store.newest()
    assert found is not None
    assert (found.adapter / "regime1/inner/weights").read_bytes() == bytes([1]) * 1000


def test_another_process_links_nothing_that_it_did_not_write(store: SnapshotStore) -> None:
    """Its numbers of revisions mean something else."""
    for step in (1, 2):
        save(store, step)
    other = SnapshotStore(store.folder, keep=2)
    for step in (3, 4):
        save(other, step, content=1)
    assert len({inode(store, step) for step in (1, 2, 3, 4)}) == 4
    save(other, 5, content=1)
    assert inode(store, 5) == inode(store, 3)


def test_a_damaged_copy_leaves_the_snapshot_before(store: SnapshotStore) -> None:
    """Although it is the third snapshot that has the damaged file."""
    for step in range(1, 6):
        save(store, step)
    path = store.folder / "00000001/adapter/regime1/inner/weights"
    path.write_bytes(b"?" * 1000)
    found = store.newest()
    assert found is not None
    assert found.name == "00000004"


def test_a_replaced_snapshot_is_linked_from_an_earlier_one(store: SnapshotStore) -> None:
    """Not from itself: it is removed when its replacement is complete."""
    for step in (1, 2, 3):
        save(store, step)
    later = draft(3, ledger=())
    store.save(later, [state_part(tensors(3)), adapter_part(write(0), name="regime1", revision=0)])
    assert inode(store, 3) == inode(store, 1)
    store.verify("00000003")


class NoLinks(Files):
    """A file system without hard links, for all but the first files."""

    def __init__(self, error: int, after: int) -> None:
        self.error = error
        self.left = after

    def link(self, old: Path, new: Path) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.error, "no link")
        super().link(old, new)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("error", [errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_what_cannot_be_linked_is_written(tmp_path: Path, error: int, after: int) -> None:
    """Wherever in a part the first link fails."""
    store = SnapshotStore(tmp_path / "snapshots", keep=2, files=NoLinks(error, after))
    for step in range(1, 5):
        save(store, step)
        store.verify(f"{step:08d}")
    assert len({inode(store, step) for step in range(1, 5)}) >= 3


def test_a_full_disk_while_linking_is_a_snapshot_error(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "snapshots", keep=2, files=NoLinks(errno.ENOSPC, 1))
    for step in (1, 2):
        save(store, step)
    with pytest.raises(SnapshotError, match=r"00000003 could not be written.*untouched"):
        save(store, 3)
    assert sorted(path.name for path in store.folder.iterdir()) == ["00000001", "00000002"]
