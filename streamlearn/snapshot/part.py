"""A part of a snapshot: files that are written together, or linked from an earlier snapshot while they are the same."""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from streamlearn.snapshot import tensors as tensor_file
from streamlearn.snapshot.contents import ADAPTER, OPTIMIZER, STATE
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.manifest import FileEntry, Manifest

_NOT_LINKABLE = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.ENOENT}
"""The file system has no hard links, or no more of this file, or someone removed the file."""


@dataclass(frozen=True)
class SnapshotPart:
    """One file, or all files below one folder."""

    name: str
    """Path of the file or folder, relative to the snapshot."""
    write: Callable[[Path], None]
    """Creates it at this path, whose parent exists."""
    revision: int | None = None
    """While it is the same, in one process, so is the content; None: the content may always be another."""


@dataclass(frozen=True)
class WrittenSnapshot:
    """A snapshot that this process wrote: what an unchanged part may be linked from."""

    folder: Path
    manifest: Manifest
    revisions: Mapping[str, int | None]
    """By part."""

    def link(self, part: SnapshotPart, folder: Path, files: Files) -> Mapping[str, FileEntry] | None:
        """Link a part that is unchanged since this snapshot into the folder of another one.

        Returns the entries of its files for the manifest; None if it changed or cannot be linked, and then there is
        nothing of it in `folder`. Raises OSError.
        """
        if part.revision is None or self.revisions.get(part.name) != part.revision:
            return None
        entries = {name: entry for name, entry in self.manifest.files.items() if _is_below(name, part.name)}
        try:
            for name in entries:
                make_parents(folder / name, files)
                files.link(self.folder / name, folder / name)
        except OSError as error:
            if error.errno not in _NOT_LINKABLE:
                raise
            if (folder / part.name).exists():
                files.remove(folder / part.name)
            return None
        return entries


def make_parents(path: Path, files: Files) -> None:
    """Create the missing folders above a path. Raises OSError."""
    if not path.parent.exists():
        make_parents(path.parent, files)
        files.make_folder(path.parent)


def state_part(tensors: Mapping[str, Tensor]) -> SnapshotPart:
    """What changes with every step."""
    return SnapshotPart(STATE, lambda path: tensor_file.write(path, tensors))


def adapter_part(write: Callable[[Path], None], *, name: str = "", revision: int | None = None) -> SnapshotPart:
    """A PEFT folder: all of `adapter/`, or one adapter of several below it."""
    return SnapshotPart(f"{ADAPTER}/{name}" if name else ADAPTER, write, revision)


def optimizer_part(name: str, tensors: Callable[[], Mapping[str, Tensor]], *, revision: int) -> SnapshotPart:
    """The optimizer's state of one adapter of several; `tensors` is only called if it is written."""
    return SnapshotPart(f"{OPTIMIZER}/{name}.safetensors", lambda path: tensor_file.write(path, tensors()), revision)


def _is_below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")
