"""The snapshot store: saving, linking, finding, pruning and moving aside."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from streamlearn.errors import SnapshotDamagedError, SnapshotError
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.parts import SnapshotPart, adapter_part, optimizer_part, state_part
from streamlearn.snapshot.store import SnapshotStore

from .kit import adapter, assert_is, draft, save, tensors


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", keep=2)


def damage(store: SnapshotStore, name: str) -> None:
    path = store.folder / name / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_the_newest_snapshot_is_read_back_completely(store: SnapshotStore) -> None:
    assert store.newest() is None
    save(store, 7)
    info = save(store, 12)
    assert_is(store.newest(), 12)
    assert (info.name, info.step, info.position) == ("00000012", 12, draft(12).position)
    assert [one.name for one in store.infos()] == ["00000007", "00000012"]
    assert store.infos()[-1] == info


def test_a_snapshot_that_is_pruned_while_they_are_listed_is_left_out(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop prunes while HTTP lists."""
    save(store, 7)
    monkeypatch.setattr(store, "names", lambda: ["00000003", "00000007"])
    assert [info.name for info in store.infos()] == ["00000007"]


def test_steps_beyond_eight_digits_stay_in_order(store: SnapshotStore) -> None:
    for step in (99_999_999, 100_000_000):
        save(store, step)
    assert store.names() == ["99999999", "100000000"]
    assert_is(store.newest(), 100_000_000)


def test_tensors_are_read_back_bit_for_bit_in_every_dtype_and_layout(store: SnapshotStore) -> None:
    """bfloat16, NaN payloads, scalars, empty and strided tensors, and shared memory."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 15), 1 << 15, (64, 3), generator=generator).to(torch.int16)
    whole = torch.randn(4, 6, generator=generator)
    state = {
        "bf16": bits.view(torch.bfloat16),
        "f16": bits.view(torch.float16),
        "rng": torch.get_rng_state(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 5),
        "strided": whole.T,
        "slice": torch.arange(10.0)[2:5],
        "flags": torch.tensor([True, False]),
    }
    store.save(draft(1), [adapter_part(adapter(1)), state_part(state)])
    snapshot = store.newest()
    assert snapshot is not None
    loaded = snapshot.tensors()
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        flat = tensor.contiguous().flatten()
        assert torch.equal(loaded[name].flatten().view(torch.uint8), flat.view(torch.uint8)), name


def test_tensors_in_memory_do_not_depend_on_the_file(store: SnapshotStore) -> None:
    """A pruned or damaged file cannot crash a process that uses its tensors."""
    save(store, 1)
    snapshot = store.newest()
    assert snapshot is not None
    loaded = snapshot.tensors()
    os.truncate(snapshot.path / "state.safetensors", 0)
    assert torch.equal(loaded["exp_avg"], tensors(1)["exp_avg"])


def test_the_same_state_is_saved_once(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM right after a snapshot writes nothing, whatever the time is."""
    first = save(store, 3)
    monkeypatch.setattr(Files, "write", lambda *_: pytest.fail("written"))
    monkeypatch.setattr(Files, "make_folder", lambda *_: pytest.fail("made"))
    assert save(store, 3, created_at="2030-01-01T00:00:00+00:00") == first


def test_a_damaged_snapshot_is_moved_aside_and_the_previous_one_used(store: SnapshotStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    damage(store, "00000003")
    damage(store, "00000002")
    with capture_logs() as events:
        assert_is(store.newest(), 1)
    assert [(event["event"], event["snapshot"]) for event in events] == [
        ("snapshot_damaged", "00000003"),
        ("snapshot_damaged", "00000002"),
    ]
    assert "state.safetensors must have SHA-256" in events[0]["fault"]
    assert sorted(path.name for path in store.folder.iterdir()) == ["00000001", "damaged-00000002", "damaged-00000003"]
    save(store, 3)
    assert_is(store.newest(), 3)


def test_without_a_valid_snapshot_there_is_no_fresh_start(store: SnapshotStore) -> None:
    """A supervisor that restarts the daemon gets the same error again, and nothing is moved."""
    save(store, 1)
    damage(store, "00000001")
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"found only damaged ones.*--fresh"):
            store.newest()
    assert store.names() == ["00000001"]
    (store.folder / "00000001").rename(store.folder / "damaged-00000001")
    with pytest.raises(SnapshotError, match="moved aside"):
        store.newest()


def test_an_unreadable_folder_is_not_treated_as_empty(tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("a file")
    with pytest.raises(SnapshotError, match="must be readable"):
        SnapshotStore(tmp_path / "snapshots", keep=2).newest()


def test_an_error_of_the_process_moves_nothing_aside(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files are not a fault of the snapshot."""
    save(store, 1)
    save(store, 2)

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("streamlearn.snapshot.files.os.open", refuse)
        with pytest.raises(SnapshotError, match="Too many open files") as caught:
            store.newest()
    assert not isinstance(caught.value, SnapshotDamagedError)
    assert store.names() == ["00000001", "00000002"]


def test_prune_keeps_the_newest_and_a_pinned_one_beside_them(tmp_path: Path) -> None:
    """A pinned snapshot counts while it is among the newest."""
    store = SnapshotStore(tmp_path / "snapshots", keep=2, pins=lambda: {"00000003"})
    for step, kept in ((3, [3]), (4, [3, 4]), (5, [3, 4, 5]), (6, [3, 5, 6])):
        save(store, step)
        store.prune()
        assert [int(name) for name in store.names()] == kept
    store.prune(keep=1)
    assert [int(name) for name in store.names()] == [3, 6]


def test_a_failed_prune_is_logged_and_not_raised(tmp_path: Path) -> None:
    class Stuck(Files):
        def remove(self, path: Path) -> None:
            raise OSError(5, "Input/output error")

    store = SnapshotStore(tmp_path / "snapshots", keep=1, files=Stuck())
    save(store, 1)
    save(store, 2)
    with capture_logs() as events:
        store.prune()
    assert [event["event"] for event in events] == ["snapshot_prune_failed"]
    assert_is(SnapshotStore(store.folder, keep=1).newest(), 2)


def test_fresh_moves_everything_aside_and_deletes_nothing(store: SnapshotStore) -> None:
    assert store.set_aside() is None
    aside = []
    for _ in range(2):
        save(store, 5)
        aside.append(store.set_aside())
        assert store.newest() is None
    assert [path.name for path in aside if path] == ["snapshots-until-00000005", "snapshots-until-00000005-2"]
    for path in aside:
        assert path is not None
        assert_is(SnapshotStore(path, keep=2).newest(), 5)


def test_a_name_is_looked_up_and_never_joined_to_a_path(store: SnapshotStore) -> None:
    save(store, 1)
    for name in ("../etc", "1", "00000009", "000000001", "", "00000001/adapter", "٠٠٠٠٠٠٠١"):
        with pytest.raises(SnapshotError, match="no snapshot"):
            store.load(name)


def test_what_an_operator_decided_replaces_the_snapshot_of_the_same_step(store: SnapshotStore) -> None:
    """Between two steps a regime may be named, frozen or dropped."""
    save(store, 3)
    assert save(store, 3, regime_changes=1, components={"scores": 1}).step == 3
    snapshot = store.newest()
    assert snapshot is not None
    assert snapshot.manifest.components == {"scores": 1}
    save(store, 3, regime_changes=1, components={"scores": 2})
    assert store.new_bytes == 0


def write(content: int) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "weights").write_bytes(bytes([content]) * 1000)
        (folder / "config").write_bytes(b"{}")

    return fill


def save_revision(store: SnapshotStore, step: int, revision: int | None = 0, content: int = 0) -> None:
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
        save_revision(store, step)
        written.append(store.new_bytes)
        store.prune()
    assert inode(store, 4) != inode(store, 5)
    assert inode(store, 4, "state.safetensors") != inode(store, 5, "state.safetensors")
    for step in (4, 5):
        assert (store.folder / f"{step:08d}" / "adapter/regime1/inner/weights").stat().st_nlink == 1  # 1 to 3 are gone
        store.verify(f"{step:08d}")
    assert written[0] == written[1]
    moments = (store.folder / "00000005/optimizer/regime1.safetensors").stat().st_size
    assert set(written[2:]) == {written[0] - 1000 - len(b"{}") - moments}


def test_a_changed_part_is_written(tmp_path: Path) -> None:
    """And one that has no revision, even if its content is the same."""
    for before, revision in ((0, 1), (None, None)):
        store = SnapshotStore(tmp_path / str(revision), keep=2)
        for step in (1, 2):
            save_revision(store, step, before)
        save_revision(store, 3, revision, content=1)
        assert len({inode(store, step) for step in (1, 2, 3)}) == 3
        weights = store.folder / "00000003/adapter/regime1/inner/weights"
        assert weights.read_bytes() == bytes([1]) * 1000


def test_another_process_links_nothing_that_it_did_not_write(store: SnapshotStore) -> None:
    """Its numbers of revisions mean something else."""
    for step in (1, 2):
        save_revision(store, step)
    other = SnapshotStore(store.folder, keep=2)
    for step in (3, 4):
        save_revision(other, step, content=1)
    assert len({inode(store, step) for step in (1, 2, 3, 4)}) == 4
    save_revision(other, 5, content=1)
    assert inode(store, 5) == inode(store, 3)


def test_a_damaged_copy_leaves_the_snapshot_before(store: SnapshotStore) -> None:
    """Although it is the third snapshot that has the damaged file."""
    for step in range(1, 6):
        save_revision(store, step)
    (store.folder / "00000001/adapter/regime1/inner/weights").write_bytes(b"?" * 1000)
    newest = store.newest()
    assert newest is not None
    assert newest.name == "00000004"


def test_a_replaced_snapshot_is_linked_from_an_earlier_one(store: SnapshotStore) -> None:
    """Not from itself: it is removed when its replacement is complete."""
    for step in (1, 2, 3):
        save_revision(store, step)
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


@pytest.mark.parametrize(("error", "after"), [(errno.EPERM, 0), (errno.EMLINK, 1), (errno.EOPNOTSUPP, 2)])
def test_what_cannot_be_linked_is_written(tmp_path: Path, error: int, after: int) -> None:
    """Wherever in a part the first link fails."""
    store = SnapshotStore(tmp_path / "snapshots", keep=2, files=NoLinks(error, after))
    for step in range(1, 5):
        save_revision(store, step)
        store.verify(f"{step:08d}")
    assert len({inode(store, step) for step in range(1, 5)}) >= 3


def test_a_full_disk_while_linking_is_a_snapshot_error(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "snapshots", keep=2, files=NoLinks(errno.ENOSPC, 1))
    for step in (1, 2):
        save_revision(store, step)
    with pytest.raises(SnapshotError, match=r"00000003 could not be written.*untouched"):
        save_revision(store, 3)
    assert sorted(path.name for path in store.folder.iterdir()) == ["00000001", "00000002"]
