"""A power loss at any moment, a full or broken disk at any operation: the old snapshot or the new one, complete."""

import errno
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamlearn.errors import SnapshotError
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.journal import Journal, Run
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.record import Position, TopicPartition

from .crash_disk import CrashDisk, Tree, lay_out, states_after
from .kit import adapter, assert_is, draft, save, tensors

LATER = Position({TopicPartition("orders", 0): 99})
State = tuple[int, int] | None
"""Step and offset of a snapshot that may be found."""


class Unsynced(Files):
    """For looking at thousands of states: fsync costs and proves nothing here."""

    def sync(self, path: Path) -> None:
        """Nothing."""


def opened(root: Path, files: Files) -> SnapshotStore:
    return SnapshotStore(root / "snapshots", keep=2, files=files)


def found(store: SnapshotStore) -> State:
    """The newest snapshot, every file of it compared."""
    snapshot = store.newest()
    if snapshot is None:
        return None
    step = snapshot.manifest.step
    if snapshot.manifest.position != LATER:
        assert_is(snapshot, step)
    return step, snapshot.manifest.position[TopicPartition("orders", 0)]


def a_life(disk: CrashDisk) -> Iterator[tuple[Tree, set[State]]]:
    """Four saves, two prunes and a replacement: every legal state after a crash, and what may be found in it."""
    store = opened(disk.root, disk)
    draw = random.Random(0)
    seen: set[tuple[Tree, frozenset[State]]] = set()
    acts: list[tuple[Callable[[], object], State]] = [
        (lambda: save(store, 1), (1, 4)),
        (lambda: save(store, 2), (2, 8)),
        (lambda: save(store, 3), (3, 12)),
        (store.prune, (3, 12)),
        (lambda: store.save(draft(3, position=LATER), adapter(3), tensors(3)), (3, 99)),
        (lambda: save(store, 4), (4, 16)),
        (store.prune, (4, 16)),
    ]
    before: State = None
    for act, after in acts:
        start = len(disk.log)
        act()
        moments: list[tuple[int, set[State]]] = [(end, {before, after}) for end in range(start, len(disk.log))]
        for end, allowed in [*moments, (len(disk.log), {after})]:
            for tree in states_after(disk.log[:end], draw):
                if (tree, frozenset(allowed)) not in seen:
                    seen.add((tree, frozenset(allowed)))
                    yield tree, allowed
        before = after


def fault(tree: Tree, allowed: set[State], root: Path, *, save_too: bool = False) -> str | None:
    """What goes wrong when a daemon starts on this disk."""
    lay_out(tree, root)
    store = opened(root, Unsynced())
    names = [name for name, _ in tree]
    try:
        if (state := found(store)) not in allowed:
            return f"found {state}, allowed {allowed}: {names}"
        if list(store.folder.glob("damaged-*")):
            return f"a crash looks like damage: {names}"
        if save_too:
            save(store, 9)
            assert_is(store.newest(), 9)
    except SnapshotError as error:
        return f"{error}: {names}"
    return None


def test_every_crash_leaves_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    """Neither never; nor does a crash look like damage, and the next save works."""
    (tmp_path / "state").mkdir()
    number = 0
    for number, (tree, allowed) in enumerate(a_life(CrashDisk(tmp_path / "state")), 1):
        assert fault(tree, allowed, tmp_path / str(number), save_too=number % 8 == 0) is None
    print(number)
    assert number >= 300


@pytest.mark.parametrize(
    "name",
    ["state.safetensors", "adapter_model*", "adapter", "manifest.json", ".staging-*", "snapshots", "state"],
)
def test_each_fsync_is_needed(tmp_path: Path, name: str) -> None:
    """The enumeration has teeth: without any one of the protocol's fsyncs it finds a state that goes wrong."""
    (tmp_path / "state").mkdir()
    states = enumerate(a_life(CrashDisk(tmp_path / "state", forget_sync_of=name)))
    assert any(fault(tree, allowed, tmp_path / str(number)) for number, (tree, allowed) in states)
