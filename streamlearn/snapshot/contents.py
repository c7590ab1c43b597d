"""The files of one snapshot folder: listed, hashed, and compared with what the manifest says of them."""

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

_DAMAGE = {errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EBADMSG}
_DAMAGE.add(getattr(errno, "EUCLEAN", errno.EIO))  # Linux alone knows it
"""Errors that say something of the files; all others (permission, open files, memory) say something of the process."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Translate what the file system says while `path` is read.

    Raises:
        SnapshotDamagedError: the files are at fault; another snapshot may do.
        SnapshotError: this process is at fault; another snapshot will not do.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or path
        fault = SnapshotDamagedError if error.errno in _DAMAGE else SnapshotError
        raise fault(f"{where}: must be readable, found: {error.strerror}") from error


def tree(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """Every file below `folder` by its relative name, and every folder, deepest first and `folder` last.

    Raises:
        SnapshotDamagedError: something is neither a plain file nor a folder, for example a symlink.
        OSError: it cannot be listed.
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
                raise SnapshotDamagedError(f"{entry.path}: plain files alone must stand here, found a link or a device")
    folders.append(folder)


def entry_of(path: Path) -> FileEntry:
    """Size and SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(bytes=file.tell(), sha256=digest)


def read_bounded(path: Path, limit: int) -> bytes:
    """A plain file's content, unless it is larger than any of its kind.

    Raises:
        SnapshotDamagedError: it is missing, unreadable or too large.
        SnapshotError: this process cannot read it.
    """
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        raise SnapshotDamagedError(f"{path}: at most {limit} bytes must stand here, found more")
    return data


def compare(folder: Path, expected: Mapping[str, FileEntry]) -> None:
    """Hold the folder against its manifest: the names, then every size, then every hash, cheapest first.

    Raises:
        SnapshotDamagedError: names the file, what must stand there and what was found.
        SnapshotError: this process cannot read it.
    """
    with reading(folder):
        found, _ = tree(folder)
        found.pop(MANIFEST, None)
        if missing := sorted(expected.keys() - found.keys()):
            raise SnapshotDamagedError(f"{folder}: {missing[0]} must be there, found nothing")
        if extra := sorted(found.keys() - expected.keys()):
            raise SnapshotDamagedError(f"{folder}: {extra[0]} must not be there, the manifest does not name it")
        for name, entry in expected.items():
            size = found[name].lstat().st_size
            if size != entry.bytes:
                raise SnapshotDamagedError(f"{folder}: {name} must have {entry.bytes} bytes, found {size}")
        for name, entry in expected.items():
            digest = entry_of(found[name]).sha256
            if digest != entry.sha256:
                raise SnapshotDamagedError(f"{folder}: {name} must have SHA-256 {entry.sha256}, found {digest}")
