"""Lives of a state folder: what is done to it, every state that a crash in between may leave, and what is wrong there.

A life is a sequence of acts, saves, prunes and lines of the journal. `legal_states` does them on a disk that remembers
and gives each tree that a power loss may leave, with what a start may find in it.
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
from streamlearn.stream.batch import Run
from streamlearn.stream.record import Position, TopicPartition

from .crash_disk import CrashDisk, Tree, lay_out, states_after
from .kit import assert_is, save

ORDERS = TopicPartition("orders", 0)
LATER = Position({ORDERS: 99})
JOURNAL = "journal.jsonl"
State = tuple[int, int] | None
"""Step and offset of a snapshot that may be found."""
Lines = tuple[int, ...]
"""Steps that stand in a journal."""


class Allowed(NamedTuple):
    """What may be found after a crash: one of these snapshots, and the beginning of one of these journals."""

    states: frozenset[State]
    journals: frozenset[Lines] = frozenset({()})
    damaged: bool = False
    """Whether something was damaged before the crash."""


class Start(NamedTuple):
    """What a start found, and what was wrong with it."""

    state: State = None
    lines: Lines = ()
    wrong: str | None = None


class Act(NamedTuple):
    """Something that a daemon does to its state folder, and what may be found when it is done."""

    do: Callable[[], object]
    state: State
    lines: Lines = ()


class Unsynced(Files):
    """For looking at thousands of states: fsync costs and proves nothing here."""

    def sync(self, path: Path) -> None:
        """Nothing."""


def opened(root: Path, files: Files | None = None) -> SnapshotStore:
    """The snapshots of a state folder."""
    return SnapshotStore(root / "snapshots", keep=2, files=files)


def found(store: SnapshotStore) -> State:
    """The newest snapshot, every file of it compared."""
    snapshot = store.newest()
    if snapshot is None:
        return None
    step, position = snapshot.manifest.step, snapshot.manifest.position
    assert_is(snapshot, step, position)
    return step, position[ORDERS]


def write_down(journal: Journal, step: int) -> None:
    """The batch of `step`, four records of one partition."""
    journal.append(step, [Run("orders", 0, 4 * step - 4, 4 * step, 4)])


def a_life(disk: CrashDisk, *, seed: int = 0) -> Iterator[tuple[Tree, Allowed]]:
    """Four saves, two prunes and a replacement."""
    store = opened(disk.root, disk)
    acts = [
        Act(partial(save, store, 1), (1, 4)),
        Act(partial(save, store, 2), (2, 8)),
        Act(partial(save, store, 3), (3, 12)),
        Act(store.prune, (3, 12)),
        Act(partial(save, store, 3, position=LATER), (3, 99)),
        Act(partial(save, store, 4), (4, 16)),
        Act(store.prune, (4, 16)),
    ]
    return legal_states(disk, acts, random.Random(seed))


def a_drawn_life(disk: CrashDisk, draw: random.Random) -> Iterator[tuple[Tree, Allowed]]:
    """Saves of any size and distance, replacements, prunes to one, two or three, and a journal that keeps pace."""
    return legal_states(disk, _drawn(disk, draw), draw, most=4, mixed=2)


def _drawn(disk: CrashDisk, draw: random.Random) -> Iterator[Act]:
    with closing(Journal(disk.root / JOURNAL, disk)) as journal:
        yield from _drawn_acts(opened(disk.root, disk), journal, draw)


def _drawn_acts(store: SnapshotStore, journal: Journal, draw: random.Random) -> Iterator[Act]:
    newest: State = None
    lines: Lines = ()
    step = 0
    for _ in range(draw.randint(3, 7)):
        for _ in range(draw.randint(0, 3)):
            step, lines = step + 1, (*lines, step + 1)
            yield Act(partial(write_down, journal, step), newest, lines)
        if newest is not None and draw.random() < 0.15:  # a rollback
            step = newest[0]
            lines = tuple(line for line in lines if line <= step)
            yield Act(partial(journal.rewind, to_step=step), newest, lines)
        later = draw.randint(0, 2)  # records that became dead letters
        newest = (step, 4 * step + later)
        components = {"padding": "x" * draw.choice((0, 100, 5000))}
        yield Act(
            partial(save, store, step, position=Position({ORDERS: newest[1]}), components=components), newest, lines
        )
        if draw.random() < 0.6:
            yield Act(partial(store.prune, draw.randint(1, 3)), newest, lines)
            oldest = int(store.names()[0])
            lines = tuple(line for line in lines if line >= oldest)
            yield Act(partial(journal.truncate, before_step=oldest), newest, lines)


def legal_states(
    disk: CrashDisk, acts: Iterable[Act], draw: random.Random, *, most: int = 8, mixed: int = 0
) -> Iterator[tuple[Tree, Allowed]]:
    """Each tree that a crash may leave during or right after an act, once with everything that may be found in it."""
    seen: set[tuple[Tree, Allowed]] = set()
    before = Act(lambda: None, None)
    for act in acts:
        start = len(disk.log)
        act.do()
        disk.notice()
        either = Allowed(frozenset({before.state, act.state}), frozenset({before.lines, act.lines}))
        done = Allowed(frozenset({act.state}), frozenset({act.lines}))
        moments = [(end, either) for end in range(start, len(disk.log))]
        for end, allowed in [*moments, (len(disk.log), done)]:
            for tree in states_after(disk.log[:end], draw, most, mixed):
                if (tree, allowed) not in seen:
                    seen.add((tree, allowed))
                    yield tree, allowed
        before = act


def fault(tree: Tree, allowed: Allowed, root: Path, *, save_too: bool = False) -> str | None:
    """What goes wrong when a daemon starts on this disk."""
    lay_out(tree, root)
    wrong = start_on(root, allowed, files=Unsynced(), save_too=save_too).wrong
    return f"{wrong}: {[name for name, _ in tree]}" if wrong else None


def start_on(root: Path, allowed: Allowed, *, files: Files | None = None, save_too: bool = False) -> Start:
    """What a daemon finds when it starts on this state folder, and what goes wrong; perhaps it saves again."""
    store, journal = opened(root, files), Journal(root / JOURNAL, files)
    start = Start()
    try:
        start = Start(found(store), tuple(entry.step for entry in journal.entries(after_step=0)))
        if start.state not in allowed.states:
            return start._replace(wrong=f"found {start.state}, allowed {set(allowed.states)}")
        if list(store.folder.glob("damaged-*")) and not allowed.damaged:
            return start._replace(wrong="a crash looks like damage")
        if not any(start.lines == legal[: len(start.lines)] for legal in allowed.journals):
            return start._replace(wrong=f"journal {start.lines}, allowed {set(allowed.journals)}")
        if save_too:
            save(store, 99)
            assert_is(store.newest(), 99)
            write_down(journal, 99)
            assert journal.entries(after_step=0)[-1].step == 99
    except (SnapshotError, AssertionError) as error:
        return start._replace(wrong=f"{type(error).__name__}: {error}")
    finally:
        journal.close()
    return start
