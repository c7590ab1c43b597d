"""After a power loss at any moment there is the old snapshot or the new one, complete."""

import random
from pathlib import Path

import pytest

from streamlearn.errors import SnapshotError
from streamlearn.snapshot.journal import Journal, JournalEntry
from streamlearn.stream.position import PartitionRun

from .crash_disk import CrashDisk, lay_out, states_after
from .histories import LATER, Unsynced, a_fixed_history, fault, newest_state, open_store
from .kit import draft, save


def test_every_crash_leaves_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    """A crash is never taken for damage, and the next save works."""
    (tmp_path / "state").mkdir()
    number = 0
    for number, (tree, allowed) in enumerate(a_fixed_history(CrashDisk(tmp_path / "state")), 1):
        assert fault(tree, allowed, tmp_path / str(number), save_too=number % 8 == 0) is None
    assert number >= 300


@pytest.mark.parametrize(
    "name",
    ["state.safetensors", "adapter_model*", "adapter", "manifest.json", ".staging-*", "snapshots", "state"],
)
def test_each_fsync_is_needed(tmp_path: Path, name: str) -> None:
    """Without any one of the protocol's fsyncs the enumeration finds a state that fails."""
    (tmp_path / "state").mkdir()
    states = enumerate(a_fixed_history(CrashDisk(tmp_path / "state", skip_sync_of=name)))
    assert any(fault(tree, allowed, tmp_path / str(number)) for number, (tree, allowed) in states)


def test_a_crash_after_a_failed_fsync_leaves_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    """The last fsync fails, the rename is undone, the power fails: any of these names may be on the disk."""

    class Failing(CrashDisk):
        broken = False

        def sync(self, path: Path) -> None:
            if self.broken and path.name == "snapshots":
                raise OSError(5, "Input/output error")
            super().sync(path)

    (tmp_path / "state").mkdir()
    disk = Failing(tmp_path / "state")
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


def test_a_crash_while_the_journal_is_rewritten_loses_no_kept_line(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    path = tmp_path / "state" / "journal.jsonl"
    disk = CrashDisk(tmp_path / "state")
    journal = Journal(path, disk)
    for step in range(1, 7):
        journal.append(step, [PartitionRun("orders", 0, step, step + 1, 1)])
    disk.sync(path)  # lines that were appended long ago
    disk.sync(path.parent)
    start = len(disk.log)
    journal.truncate(before_step=3)
    journal.rewind(to_step=5)
    journal.close()
    trees = {tree for end in range(start, len(disk.log) + 1) for tree in states_after(disk.log[:end], random.Random(0))}
    assert len(trees) > 5
    for number, tree in enumerate(sorted(trees, key=repr)):
        lay_out(tree, tmp_path / str(number))
        steps = [entry.step for entry in Journal(tmp_path / str(number) / path.name).entries(after_step=0)]
        assert steps in ([1, 2, 3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5])


def test_a_crash_after_a_flush_finds_it_in_the_journal(tmp_path: Path) -> None:
    """A snapshot taken after a flush depends on it; the lines before it may only be lost as long as it is not there."""
    (tmp_path / "state").mkdir()
    path = tmp_path / "state" / "journal.jsonl"
    disk = CrashDisk(tmp_path / "state")
    journal = Journal(path, disk)
    run = PartitionRun("orders", 0, 1, 2, 1)
    journal.append(1, [run])
    start = len(disk.log)
    journal.append_flush([JournalEntry(2, (run,)), JournalEntry(3, (run,), flush=True)])
    journal.close()
    found = []
    for end in range(start, len(disk.log) + 1):
        trees = sorted(set(states_after(disk.log[:end], random.Random(0))), key=repr)
        for number, tree in enumerate(trees):
            folder = tmp_path / f"{end}-{number}"
            lay_out(tree, folder)
            found.append([entry.step for entry in Journal(folder / path.name).entries(after_step=0)])
            assert found[-1] in ([], [1], [1, 2, 3])
            assert end < len(disk.log) or found[-1] == [1, 2, 3]
    assert [] in found or [1] in found
