"""After a power loss at any moment there is the old snapshot or the new one, complete."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from streamlearn.errors import SnapshotError
from streamlearn.snapshot.journal import Journal, JournalEntry
from streamlearn.stream.position import PartitionRun

from .crash_disk import CrashDisk, lay_out, states_after
from .histories import JOURNAL, LATER, Unsynced, a_fixed_history, fault, newest_state, open_store
from .kit import draft, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty state folder."""
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def test_every_crash_leaves_the_old_snapshot_or_the_new_one(tmp_path: Path, root: Path) -> None:
    """A crash is never taken for damage, and the next save works."""
    number = 0
    for number, (tree, allowed) in enumerate(a_fixed_history(CrashDisk(root)), 1):
        assert fault(tree, allowed, tmp_path / str(number), save_too=number % 8 == 0) is None
    assert number >= 300


@pytest.mark.parametrize(
    "name",
    ["state.safetensors", "adapter_model*", "adapter", "manifest.json", ".staging-*", "snapshots", "state"],
)
def test_each_fsync_is_needed(tmp_path: Path, root: Path, name: str) -> None:
    """Without any one of the protocol's fsyncs the enumeration finds a state that fails."""
    states = enumerate(a_fixed_history(CrashDisk(root, skip_sync_of=name)))
    assert any(fault(tree, allowed, tmp_path / str(number)) for number, (tree, allowed) in states)


def test_a_crash_after_a_failed_fsync_leaves_the_old_snapshot_or_the_new_one(tmp_path: Path, root: Path) -> None:
    """The last fsync fails, the rename is undone, the power fails: any of these names may be on the disk."""

    class Failing(CrashDisk):
        broken = False

        def sync(self, path: Path) -> None:
            if self.broken and path.name == "snapshots":
                raise OSError(5, "Input/output error")
            super().sync(path)

    disk = Failing(root)
    store = open_store(disk.root, disk)
    save(store, 3)
    start, disk.broken = len(disk.log), True
    for step, position in ((3, LATER), (4, draft(4).position)):
        with pytest.raises(SnapshotError):
            save(store, step, position=position)
        assert newest_state(open_store(disk.root, Unsynced())) == (3, 12)
    draw = random.Random(0)
    trees = {tree for end in range(start, len(disk.log) + 1) for tree in states_after(disk.log[:end], draw)}
    for number, tree in enumerate(sorted(trees, key=repr)):
        lay_out(tree, tmp_path / str(number))
        assert newest_state(open_store(tmp_path / str(number), Unsynced())) in {(3, 12), (3, 99), (4, 16)}


RUN = PartitionRun("orders", 0, 1, 2, 1)


def journals_after_a_crash(disk: CrashDisk, *, start: int) -> Iterator[tuple[int, list[int]]]:
    """For each moment from `start` on, and each state that a crash may leave then: the steps in its journal."""
    for end in range(start, len(disk.log) + 1):
        for number, tree in enumerate(sorted(set(states_after(disk.log[:end], random.Random(0))), key=repr)):
            folder = disk.root.with_name(f"{end}-{number}")
            lay_out(tree, folder)
            yield end, [entry.step for entry in Journal(folder / JOURNAL).entries(after_step=0)]


def test_a_crash_while_the_journal_is_rewritten_loses_no_kept_line(root: Path) -> None:
    disk = CrashDisk(root)
    with closing(Journal(root / JOURNAL, disk)) as journal:
        for step in range(1, 7):
            journal.append(step, [RUN])
        disk.sync(root / JOURNAL)  # lines that were appended long ago
        disk.sync(root)
        start = len(disk.log)
        journal.truncate(before_step=3)
        journal.rewind(to_step=5)
    journals = [steps for _, steps in journals_after_a_crash(disk, start=start)]
    assert len(journals) > 5
    assert all(steps in ([1, 2, 3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5]) for steps in journals)


def test_a_crash_after_a_flush_finds_it_in_the_journal(root: Path) -> None:
    """A snapshot taken after a flush depends on it; the lines before it may only be lost as long as it is not there."""
    disk = CrashDisk(root)
    with closing(Journal(root / JOURNAL, disk)) as journal:
        journal.append(1, [RUN])
        start = len(disk.log)
        journal.append_flush([JournalEntry(2, (RUN,)), JournalEntry(3, (RUN,), flush=True)])
    journals = [*journals_after_a_crash(disk, start=start)]
    assert {tuple(steps) for _, steps in journals} > {(1, 2, 3)}
    assert all(steps in ([], [1], [1, 2, 3]) for _, steps in journals)
    assert all(steps == [1, 2, 3] for end, steps in journals if end == len(disk.log))
