"""Histories of a state folder: every state that a crash may leave at any moment, and what is wrong with it.

A history is a sequence of actions: saves, prunes and journal lines. `crash_states` runs them on a recording disk
and yields each tree that a power loss may leave, with what a start may find in it.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from streamlearn.errors import SnapshotError
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.journal import Journal
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.position import PartitionRun, Position, TopicPartition

from .crash_disk import CrashDisk, Tree, lay_out, states_after
from .kit import assert_is, save

ORDERS = TopicPartition("orders", 0)
LATER = Position({ORDERS: 99})
JOURNAL = "journal.jsonl"
State = tuple[int, int] | None
"""Step and offset of a snapshot, or None without one."""
Lines = tuple[int, ...]
"""The steps in a journal."""


class Allowed(NamedTuple):
    """What may be found after a crash: one of these snapshots, and the first lines of one of these journals."""

    states: frozenset[State]
    journals: frozenset[Lines] = frozenset({()})
    damaged: bool = False
    """Whether something was damaged before the crash."""


class Start(NamedTuple):
    """What a start found, and what is wrong with it."""

    state: State = None
    lines: Lines = ()
    wrong: str | None = None


class Action(NamedTuple):
    """A change that a daemon makes to its state folder, and what is to be found after it."""

    do: Callable[[], object]
    state: State
    lines: Lines = ()


class Unsynced(Files):
    """For starts on thousands of states: fsync takes time and proves nothing here."""

    def sync(self, path: Path) -> None:
        """Do nothing."""


def open_store(root: Path, files: Files | None = None) -> SnapshotStore:
    """Open the snapshots of a state folder."""
    return SnapshotStore(root / "snapshots", keep=2, files=files)


def newest_state(store: SnapshotStore) -> State:
    """Return the newest snapshot's step and offset, after comparing every file of it."""
    snapshot = store.newest()
    if snapshot is None:
        return None
    step, position = snapshot.manifest.step, snapshot.manifest.position
    assert_is(snapshot, step, position)
    return step, position[ORDERS]


def append_batch(journal: Journal, step: int) -> None:
    """Append the batch of `step`: four records of one partition."""
    journal.append(step, [PartitionRun("orders", 0, 4 * step - 4, 4 * step, 4)])


def a_fixed_history(disk: CrashDisk, *, seed: int = 0) -> Iterator[tuple[Tree, Allowed]]:
    """Yield the crash states of four saves, two prunes and a replacement."""
    store = open_store(disk.root, disk)
    actions = [
        Action(partial(save, store, 1), (1, 4)),
        Action(partial(save, store, 2), (2, 8)),
        Action(partial(save, store, 3), (3, 12)),
        Action(store.prune, (3, 12)),
        Action(partial(save, store, 3, position=LATER), (3, 99)),
        Action(partial(save, store, 4), (4, 16)),
        Action(store.prune, (4, 16)),
    ]
    return crash_states(disk, actions, random.Random(seed))


def a_random_history(disk: CrashDisk, draw: random.Random) -> Iterator[tuple[Tree, Allowed]]:
    """Yield the crash states of random saves, replacements, prunes to 1 to 3 snapshots, rollbacks and journal lines."""
    return crash_states(disk, _random_actions(disk, draw), draw, limit=4, mixed=2)


def _random_actions(disk: CrashDisk, draw: random.Random) -> Iterator[Action]:
    with closing(Journal(disk.root / JOURNAL, disk)) as journal:
        yield from _actions(open_store(disk.root, disk), journal, draw)


def _actions(store: SnapshotStore, journal: Journal, draw: random.Random) -> Iterator[Action]:
    newest: State = None
    lines: Lines = ()
    step = 0
    for _ in range(draw.randint(3, 7)):
        for _ in range(draw.randint(0, 3)):
            step, lines = step + 1, (*lines, step + 1)
            yield Action(partial(append_batch, journal, step), newest, lines)
        if newest is not None and draw.random() < 0.15:  # a rollback
            step = newest[0]
            lines = tuple(line for line in lines if line <= step)
            yield Action(partial(journal.rewind, to_step=step), newest, lines)
        later = draw.randint(0, 2)  # records that became dead letters
        newest = (step, 4 * step + later)
        components = {"padding": "x" * draw.choice((0, 100, 5000))}
        yield Action(
            partial(save, store, step, position=Position({ORDERS: newest[1]}), components=components), newest, lines
        )
        if draw.random() < 0.6:
            yield Action(partial(store.prune, draw.randint(1, 3)), newest, lines)
            oldest = int(store.names()[0])
            lines = tuple(line for line in lines if line >= oldest)
            yield Action(partial(journal.truncate, before_step=oldest), newest, lines)


def crash_states(
    disk: CrashDisk, actions: Iterable[Action], draw: random.Random, *, limit: int = 8, mixed: int = 0
) -> Iterator[tuple[Tree, Allowed]]:
    """Yield each tree that a crash may leave during or right after an action, with what may be found in it."""
    seen: set[tuple[Tree, Allowed]] = set()
    before = Action(lambda: None, None)
    for action in actions:
        start = len(disk.log)
        action.do()
        disk.record_changes()
        either = Allowed(frozenset({before.state, action.state}), frozenset({before.lines, action.lines}))
        done = Allowed(frozenset({action.state}), frozenset({action.lines}))
        moments = [(end, either) for end in range(start, len(disk.log))]
        for end, allowed in [*moments, (len(disk.log), done)]:
            for tree in states_after(disk.log[:end], draw, limit, mixed):
                if (tree, allowed) not in seen:
                    seen.add((tree, allowed))
                    yield tree, allowed
        before = action


def fault(tree: Tree, allowed: Allowed, root: Path, *, save_too: bool = False) -> str | None:
    """Return what goes wrong when a daemon starts on this tree; None if nothing does."""
    lay_out(tree, root)
    wrong = start_on(root, allowed, files=Unsynced(), save_too=save_too).wrong
    return f"{wrong}: {[name for name, _ in tree]}" if wrong else None


def start_on(root: Path, allowed: Allowed, *, files: Files | None = None, save_too: bool = False) -> Start:
    """Start on a state folder, save once more if asked, and return what was found and what went wrong."""
    store, journal = open_store(root, files), Journal(root / JOURNAL, files)
    start = Start()
    try:
        start = Start(newest_state(store), tuple(entry.step for entry in journal.entries(after_step=0)))
        if start.state not in allowed.states:
            return start._replace(wrong=f"found {start.state}, allowed {set(allowed.states)}")
        if list(store.folder.glob("damaged-*")) and not allowed.damaged:
            return start._replace(wrong="a crash was taken for damage")
        if not any(start.lines == lines[: len(start.lines)] for lines in allowed.journals):
            return start._replace(wrong=f"journal {start.lines}, allowed {set(allowed.journals)}")
        if save_too:
            save(store, 99)
            assert_is(store.newest(), 99)
            append_batch(journal, 99)
            assert journal.entries(after_step=0)[-1].step == 99
    except (SnapshotError, AssertionError) as error:
        return start._replace(wrong=f"{type(error).__name__}: {error}")
    finally:
        journal.close()
    return start
