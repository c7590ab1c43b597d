"""After a power loss or a kill at any moment of a rollback there is the old run or the rolled-back one, complete."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamlearn.controls import Control, ControlFile, StateControls
from streamlearn.errors import SnapshotError
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.journal import Journal
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.position import OffsetRange
from tests.crash.calls import CannotTraceError, run_and_kill
from tests.snapshot.crash_disk import CrashDisk, Tree, lay_out, states_after
from tests.snapshot.histories import JOURNAL, ORDERS, Unsynced, append_batch, newest_state
from tests.snapshot.kit import save

SKIPPED = OffsetRange(ORDERS, 6, 9)
OLD = ((3, 12), (1, 2, 3, 4), (), ("00000001", "00000003"))
NEW = ((1, 4), (1,), (SKIPPED,), ("00000001",))
Found = tuple[object, tuple[int, ...], tuple[OffsetRange, ...], tuple[str, ...]]


@contextmanager
def opened(root: Path, files: Files | None = None) -> Iterator[tuple[StateControls, SnapshotStore, Journal]]:
    file = ControlFile(root, files)
    store = SnapshotStore(root / "snapshots", keep=9, pins=lambda: file.state.pins, files=files)
    journal = Journal(root / JOURNAL, files)
    try:
        yield StateControls(file, store, journal), store, journal
    finally:
        journal.close()


def prepare(root: Path, files: Files | None = None) -> None:
    with opened(root, files) as (controls, store, journal):
        for step in (1, 2, 3, 4):
            append_batch(journal, step)
            if step < 4:
                save(store, step)
        controls.apply(Control.snapshot("pin", "00000001"))
        controls.apply(Control.snapshot("pin", "00000003"))


def roll_back(root: Path, files: Files | None = None) -> None:
    with opened(root, files) as (controls, _, _):
        controls.roll_back("00000001", [SKIPPED])


def start(root: Path) -> Found:
    with opened(root, Unsynced()) as (controls, store, journal):
        controls.finish_rollback()
        newest = newest_state(store)
        lines = tuple(entry.step for entry in journal.entries(after_step=0))
        found = newest, lines, tuple(controls.state.skipped), tuple(sorted(controls.state.pins))
        assert controls.state.rolling_back_to is None
        assert not list(store.folder.glob("damaged-*")), "a crash was taken for damage"
        moved = {path.name for path in store.folder.glob("rolled-back-*")}
        assert moved == (set() if found == OLD else {"rolled-back-00000002", "rolled-back-00000003"})
        save(store, 9)
        return found


def is_faulty(tree: Tree, root: Path) -> bool:
    lay_out(tree, root)
    try:
        return start(root) not in (OLD, NEW)
    except (AssertionError, SnapshotError):
        return True


def crash_states(disk: CrashDisk, since: int) -> list[tuple[int, Tree]]:
    """Every tree that a power loss may leave, with the number of operations that had been made."""
    draw = random.Random(0)
    seen: dict[Tree, int] = {}
    for end in range(since, len(disk.log) + 1):
        for tree in states_after(disk.log[:end], draw, 4):
            seen.setdefault(tree, end)
    return [(end, tree) for tree, end in seen.items()]


def test_every_crash_leaves_the_old_run_or_the_rolled_back_one(tmp_path: Path) -> None:
    """Snapshot, journal, skipped records and pins belong together, and the next save works."""
    (tmp_path / "state").mkdir()
    disk = CrashDisk(tmp_path / "state")
    prepare(disk.root, disk)
    disk.sync(disk.root / JOURNAL)  # lines that were appended long ago
    disk.sync(disk.root)
    disk.record_changes()
    since = len(disk.log)
    roll_back(disk.root, disk)
    disk.record_changes()
    found = []
    for number, (_, tree) in enumerate(crash_states(disk, since)):
        root = tmp_path / str(number)
        lay_out(tree, root)
        found.append(start(root))
        shutil.rmtree(root)
        assert found[-1] in (OLD, NEW), found[-1]
    assert found.count(OLD) >= 3
    assert found.count(NEW) >= 10


def test_a_rollback_is_finished_only_once_it_is_durable(tmp_path: Path) -> None:
    """Without the fsync of the control file's folder a power loss could bring back half of the old run."""
    (tmp_path / "state").mkdir()
    disk = CrashDisk(tmp_path / "state", skip_sync_of="state")
    prepare(disk.root, disk)
    disk.record_changes()
    roll_back(disk.root, disk)
    disk.record_changes()
    states = enumerate(crash_states(disk, len(disk.log) - 12))
    assert any(is_faulty(tree, tmp_path / str(number)) for number, (_, tree) in states)


@pytest.mark.parametrize("call", ["fsync", "rename", "unlink"])
def test_a_kill_at_a_system_call_leaves_the_old_run_or_the_rolled_back_one(tmp_path: Path, call: str) -> None:
    """With the real interpreter and file system."""
    template = tmp_path / "template"
    template.mkdir()
    prepare(template)
    found, killed, number = [], True, 0
    while killed:
        number += 1
        root = tmp_path / str(number)
        shutil.copytree(template, root)
        try:
            killed = run_and_kill(lambda root=root: roll_back(root), call, number)  # type: ignore[misc]
        except CannotTraceError as error:
            pytest.skip(str(error))
        found.append(start(root))
        assert found[-1] in (OLD, NEW), found[-1]
    assert found[-1] == NEW
    assert found == sorted(found, key=(OLD, NEW).index), "once decided, it is never undone"
