"""The files of one snapshot folder: listed, hashed, and compared with the manifest."""

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from streamlearn.errors import SnapshotDamagedError, SnapshotError
from streamlearn.snapshot.manifest import FileEntry

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
