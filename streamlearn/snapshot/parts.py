"""A part of a snapshot: files that are written together, or linked from an earlier snapshot while they are the same."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from streamlearn.errors import SnapshotDamagedError, SnapshotError
from streamlearn.snapshot import tensors as tensor_file
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.manifest import MAX_BYTES, FileEntry, Manifest
from streamlearn.stream.record import Position

MANIFEST = "manifest.json"
ADAPTER = "adapter"
STATE = "state.safetensors"
OPTIMIZER = "optimizer"
"""Folder with the optimizer's state of each regime's adapter; without such adapters it is in `STATE`."""

_DAMAGE = {errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EBADMSG}
_DAMAGE.add(getattr(errno, "EUCLEAN", errno.EIO))  # exists on Linux only
"""Errors caused by the files. All others (permission, open files, memory) are caused by this process."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Translate the OSErrors that occur while `path` is read.

    Raises:
        SnapshotDamagedError: the files are at fault; another snapshot may be readable.
        SnapshotError: this process is at fault; other snapshots would fail in the same way.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or path
        fault = SnapshotDamagedError if error.errno in _DAMAGE else SnapshotError
        raise fault(f"{where}: must be readable, found: {error.strerror}") from error


def list_tree(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """List every file below `folder` by relative name, and every folder, deepest first and `folder` last.

    Raises:
        SnapshotDamagedError: an entry is neither a regular file nor a folder, for example a symlink.
        OSError: the folder cannot be listed.
    """
    files: dict[str, Path] = {}
    folders: list[Path] = []
    _walk(folder, "", files, folders)
    return files, folders


def _walk(folder: Path, prefix: str, files: dict[str, Path], folders: list[Path]) -> None:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                _walk(folder / entry.name, f"{prefix}{entry.name}/", files, folders)
            elif entry.is_file(follow_symlinks=False):
                files[prefix + entry.name] = folder / entry.name
            else:
                kind = "a symbolic link" if entry.is_symlink() else "a device, socket or pipe"
                raise SnapshotDamagedError(f"{entry.path}: expected a regular file or a folder, found {kind}")
    folders.append(folder)


def hash_file(path: Path) -> FileEntry:
    """Return the size and SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(bytes=file.tell(), sha256=digest)


def read_bounded(path: Path, limit: int) -> bytes:
    """Return a regular file's content of at most `limit` bytes.

    Raises:
        SnapshotDamagedError: the file is missing, unreadable or too large.
        SnapshotError: this process cannot read it.
    """
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        raise SnapshotDamagedError(f"{path}: expected at most {limit} bytes, found more")
    return data


def compare(folder: Path, expected: Mapping[str, FileEntry]) -> None:
    """Compare the folder with its manifest, cheapest checks first.

    1. The names: nothing missing, nothing extra.
    2. Every size.
    3. Every hash.

    Raises:
        SnapshotDamagedError: names the file, what was expected and what was found.
        SnapshotError: this process cannot read it.
    """
    with reading(folder):
        found, _ = list_tree(folder)
        found.pop(MANIFEST, None)
        _compare_names(folder, expected, found)  # 1.
        for name, entry in expected.items():  # 2.
            size = found[name].lstat().st_size
            if size != entry.bytes:
                raise SnapshotDamagedError(f"{folder}: {name} must have {entry.bytes} bytes, found {size}")
        for name, entry in expected.items():  # 3.
            digest = hash_file(found[name]).sha256
            if digest != entry.sha256:
                raise SnapshotDamagedError(f"{folder}: {name} must have SHA-256 {entry.sha256}, found {digest}")


def _compare_names(folder: Path, expected: Mapping[str, FileEntry], found: Mapping[str, Path]) -> None:
    if missing := sorted(expected.keys() - found.keys()):
        raise SnapshotDamagedError(f"{folder}: {missing[0]} is missing, the manifest names it")
    if extra := sorted(found.keys() - expected.keys()):
        raise SnapshotDamagedError(f"{folder}: unexpected file {extra[0]}, the manifest does not name it")


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


@dataclass(frozen=True)
class SnapshotInfo:
    """The summary of a snapshot."""

    name: str
    step: int
    created_at: str
    bytes: int
    position: Position

    @classmethod
    def of(cls, manifest: Manifest) -> "SnapshotInfo":
        """Summarize a manifest; `bytes` does not count the manifest itself."""
        size = sum(entry.bytes for entry in manifest.files.values())
        return cls(snapshot_name(manifest.step), manifest.step, manifest.created_at, size, manifest.position)


@dataclass(frozen=True)
class Snapshot:
    """One verified snapshot on disk."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """The step, in 8 digits or more."""
        return self.path.name

    @property
    def adapter(self) -> Path:
        """The PEFT adapter folder."""
        return self.path / ADAPTER

    def tensors(self) -> dict[str, Tensor]:
        """Read the tensors of `STATE` into CPU memory. Raises like `weights`."""
        return self._read(self.path / STATE)

    def adapters(self) -> list[str]:
        """Names of the adapters, where each has its own folder in `adapter/`; else empty."""
        return sorted(path.name for path in self.adapter.iterdir() if path.is_dir())

    def weights(self, adapter: str = "") -> dict[str, Tensor]:
        """Read the weights of one of `adapters`, or where there is only one, its own.

        Raises:
            SnapshotDamagedError: the file changed since it was verified.
            SnapshotError: this process cannot read it.
        """
        return self._read(self.adapter / adapter / "adapter_model.safetensors")

    def moments(self, adapter: str) -> dict[str, Tensor]:
        """Read the optimizer's state of one of `adapters`. Raises like `weights`."""
        return self._read(self.path / OPTIMIZER / f"{adapter}.safetensors")

    @staticmethod
    def _read(path: Path) -> dict[str, Tensor]:
        with reading(path):
            return tensor_file.read(path)


def snapshot_name(step: int) -> str:
    """Return the folder name of a step's snapshot."""
    return f"{step:08d}"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a snapshot folder; the other files are not read.

    Raises:
        SnapshotDamagedError: the manifest was changed, or belongs to another step.
        SnapshotError: this process cannot read it.
        SnapshotMismatchError: it has another format.
    """
    if folder.is_symlink():
        raise SnapshotDamagedError(f"{folder}: expected a folder, found a symbolic link")
    manifest = Manifest.from_bytes(read_bounded(folder / MANIFEST, MAX_BYTES), where=str(folder / MANIFEST))
    if snapshot_name(manifest.step) != folder.name:
        raise SnapshotDamagedError(f"{folder}: expected the snapshot of step {folder.name}, found step {manifest.step}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Verify a snapshot folder and return its manifest.

    1. The manifest against its seal.
    2. Every other file against the manifest.
    3. The length of each tensor file's header, before anything parses it.

    Raises:
        SnapshotDamagedError: names the file, what was expected and what was found.
        SnapshotError: this process cannot read it.
        SnapshotMismatchError: the manifest has another format.
    """
    manifest = read_manifest(folder)  # 1.
    compare(folder, manifest.files)  # 2.
    for path in _tensor_files(folder):  # 3.
        with reading(path):
            tensor_file.check_header(path)
    return manifest


def _tensor_files(folder: Path) -> list[Path]:
    return [folder / STATE, *sorted((folder / OPTIMIZER).glob("*.safetensors"))]
