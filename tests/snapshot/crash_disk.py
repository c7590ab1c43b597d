"""A simulated disk that records every operation and enumerates what a power loss may have left of them.

Modelled on SQLite's crash tests. The rules are the weakest that POSIX allows, weaker than any file system in use:

- a file's content is durable after the file was synced, until it is written again. Before that, all of it may exist, or
  nothing, or the first half, or zeros in its place;
- a name (creation, rename, removal) is durable after its folder was synced. Before that, each one may have
  happened or not, in any combination in which each finds its file.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from streamlearn.snapshot.files import Files

ROOT = 0
Tree = tuple[tuple[str, bytes | None], ...]
"""Relative names, sorted; a folder has no content."""


@dataclass(frozen=True)
class Link:
    """A new name."""

    parent: int
    name: str
    child: int
    is_folder: bool


@dataclass(frozen=True)
class Unlink:
    """A removed name."""

    parent: int
    name: str
    child: int


@dataclass(frozen=True)
class Move:
    """A rename."""

    parent: int
    name: str
    child: int
    to_parent: int
    to_name: str


@dataclass(frozen=True)
class Content:
    """New content of a file."""

    inode: int
    data: bytes


@dataclass(frozen=True)
class Sync:
    """A sync: everything done to this file or folder so far is durable."""

    inode: int


Naming = Link | Unlink | Move
Operation = Naming | Content | Sync


@dataclass
class Model:
    """A tree of inodes that naming operations change."""

    children: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    def apply(self, operation: Naming) -> None:
        """Apply the operation, unless one that it depends on did not happen."""
        names = self.children.setdefault(operation.parent, {})
        match operation:
            case Link(_, name, child, is_folder):
                names[name] = child
                if is_folder:
                    self.children.setdefault(child, {})
            case Unlink(_, name, child) if names.get(name) == child:
                del names[name]
            case Move(_, name, child, to_parent, to_name) if names.get(name) == child:
                target = self.children[to_parent].get(to_name)
                replaces_content = target is not None and bool(self.children.get(target))  # never done to a folder
                if name in names and not replaces_content:
                    self.children[to_parent][to_name] = names.pop(name)

    def resolve(self, parts: tuple[str, ...]) -> int:
        """Return the inode of a path."""
        inode = ROOT
        for part in parts:
            inode = self.children[inode][part]
        return inode

    def walk(
        self, content: Callable[[int], bytes], inode: int = ROOT, prefix: str = ""
    ) -> Iterator[tuple[str, bytes | None]]:
        """Yield the tree, folders before their content."""
        for name, child in sorted(self.children[inode].items()):
            if child in self.children:
                yield prefix + name, None
                yield from self.walk(content, child, f"{prefix}{name}/")
            else:
                yield prefix + name, content(child)


class CrashDisk(Files):
    """The real file system below `root`, recorded; other writes are recorded at the next operation."""

    def __init__(self, root: Path, *, skip_sync_of: str | None = None) -> None:
        self.root = root
        self.log: list[Operation] = []
        self._skip_sync_of = skip_sync_of
        self._model = Model()
        self._content: dict[int, bytes] = {}
        self._inodes = itertools.count(ROOT + 1)

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.record_changes()

    def write(self, path: Path, data: bytes) -> None:
        super().write(path, data)
        self.record_changes()

    def link(self, old: Path, new: Path) -> None:
        self.record_changes()
        super().link(old, new)
        self._name(Link(self._inode(new.parent), new.name, self._inode(old), is_folder=False))

    def sync(self, path: Path) -> None:
        self.record_changes()
        if self._skip_sync_of is None or not fnmatch(path.name, self._skip_sync_of):
            self.log.append(Sync(self._inode(path)))

    def rename(self, old: Path, new: Path) -> None:
        self.record_changes()
        move = Move(self._inode(old.parent), old.name, self._inode(old), self._inode(new.parent), new.name)
        super().rename(old, new)
        self._name(move)

    def remove(self, path: Path) -> None:
        self.record_changes()
        for inner in sorted(path.rglob("*"), reverse=True):
            self._name(Unlink(self._inode(inner.parent), inner.name, self._inode(inner)))
        self._name(Unlink(self._inode(path.parent), path.name, self._inode(path)))
        super().remove(path)

    def record_changes(self) -> None:
        """Record what appeared or changed outside of these methods."""
        for path in sorted(self.root.rglob("*")):
            parent = self._inode(path.parent)
            if path.name not in self._model.children[parent]:
                self._name(Link(parent, path.name, next(self._inodes), path.is_dir()))
            inode = self._inode(path)
            if not path.is_dir() and self._content.get(inode) != (data := path.read_bytes()):
                self._content[inode] = data
                self.log.append(Content(inode, data))

    def _name(self, operation: Naming) -> None:
        self._model.apply(operation)
        self.log.append(operation)

    def _inode(self, path: Path) -> int:
        return self._model.resolve(path.relative_to(self.root).parts)


def states_after(log: list[Operation], draw: random.Random, limit: int = 8, mixed: int = 0) -> set[Tree]:
    """Return the trees that a power loss right after `log` may leave, with at most `limit` random sets of lost names.

    All unsynced files share one outcome, each outcome in turn; in `mixed` more states every file has its own.
    """
    pending: set[int] = set()
    volatile: dict[int, bytes] = {}
    durable: dict[int, bytes] = {}
    for index, operation in enumerate(log):
        match operation:
            case Content(inode, data):
                volatile[inode] = data
            case Sync(inode):
                pending = {one for one in pending if inode not in _holders(log[one])}
                if inode in volatile:
                    durable[inode] = volatile.pop(inode)
            case _:
                pending.add(index)
    outcomes = [dict.fromkeys(volatile, outcome) for outcome in _OUTCOMES]
    outcomes += [{inode: draw.choice(_OUTCOMES) for inode in volatile} for _ in range(mixed)]
    return {
        _tree(log, lost, {**durable, **{inode: outcome[inode](data) for inode, data in volatile.items()}})
        for lost in _subsets(sorted(pending), draw, limit)
        for outcome in outcomes
    }


def _holders(operation: Operation) -> tuple[int, ...]:
    if isinstance(operation, Move):
        return operation.parent, operation.to_parent
    assert isinstance(operation, Link | Unlink)
    return (operation.parent,)


def _subsets(pending: list[int], draw: random.Random, limit: int) -> Iterator[frozenset[int]]:
    if 1 << len(pending) <= limit:
        for size in range(len(pending) + 1):
            yield from map(frozenset, itertools.combinations(pending, size))
        return
    for cut in range(len(pending) + 1):  # a journalling file system loses the last operations
        yield frozenset(pending[cut:])
    for _ in range(limit):
        yield frozenset(one for one in pending if draw.random() < 0.5)


def _tree(log: list[Operation], lost: frozenset[int], content: dict[int, bytes]) -> Tree:
    model = Model()
    for index, operation in enumerate(log):
        if index not in lost and isinstance(operation, Link | Unlink | Move):
            model.apply(operation)
    return tuple(model.walk(lambda inode: content.get(inode, b"")))


def _whole(data: bytes) -> bytes:
    return data


def _nothing(_: bytes) -> bytes:
    return b""


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _zeros(data: bytes) -> bytes:
    return bytes(len(data))


_OUTCOMES = (_whole, _nothing, _half, _zeros)


def lay_out(tree: Tree, root: Path) -> None:
    """Write a tree to the real disk."""
    root.mkdir()
    for name, content in tree:
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
