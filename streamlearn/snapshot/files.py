"""File operations of snapshots: writing, in the order that decides what a crash leaves behind, and checked reading.

Everything that must be durable goes through `Files`. Tests replace it with a subclass: one fails at the n-th operation,
another records every operation and enumerates what a power loss may have kept.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError

from streamlearn.errors import SnapshotDamagedError, SnapshotError, StateLockedError
from streamlearn.snapshot.manifest import MANIFEST, FileEntry


class Files:
    """The real file system. Each method raises OSError and leaves the translation to its caller."""

    mode = 0o600
    """Mode of created files, before the umask: the state of a run contains records."""

    def make_folder(self, path: Path) -> None:
        """Create one folder, which must not exist, readable by its owner only."""
        path.mkdir(mode=0o700)

    def write(self, path: Path, data: bytes) -> None:
        """Create one file, which must not exist, with this content. Nothing is durable before `sync`."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.mode), "wb") as file:
            file.write(data)

    def link(self, old: Path, new: Path) -> None:
        """Give a file another name, which must not exist: both are the same file, which must not be written again."""
        os.link(old, new, follow_symlinks=False)

    def sync(self, path: Path) -> None:
        """Make a file's content durable, or a folder's entries: new names, renames and removals.

        Never retry a failed sync on the same file: the kernel may have dropped the unwritten pages and marked them
        clean, so a second call would succeed without having written anything. Write a new file instead.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Rename `old` to `new` atomically; an existing file or empty folder of that name is replaced."""
        old.rename(new)

    def replace(self, path: Path, data: bytes) -> None:
        """Replace a file's content, or create it: durable when this returns; before, the old content or the new one.

        1. Write and sync a new file beside it.
        2. Rename it to `path`.
        3. Sync the folder.
        """
        fresh = path.with_name(f"{path.name}.new")
        if fresh.exists():
            self.remove(fresh)
        self.write(fresh, data)  # 1.
        self.sync(fresh)
        self.rename(fresh, path)  # 2.
        self.sync(path.parent)  # 3.

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder and its content. Not atomic: rename anything that still has a meaning first."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class SharedFiles(Files):
    """Files that other users may read, as far as the umask allows: publications."""

    mode = 0o666


def share(folder: Path) -> None:
    """Let others read what libraries wrote into a new folder, as far as the umask allows: safetensors makes files 0600.

    The folder's own mode, 0777 less the umask, says what it allows.

    Raises:
        OSError: a mode cannot be changed.
    """
    mode = folder.stat().st_mode & SharedFiles.mode
    for file in list_tree(folder)[0].values():
        file.chmod(mode)


_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether this error or its cause is a full disk; safetensors' errors hold the number in their text only."""
    if isinstance(error, SafetensorError) and any(f"(os error {number})" in str(error) for number in _FULL):
        return True
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return error is not None and is_disk_full(error.__cause__)


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
        files, _ = list_tree(folder)
        files.pop(MANIFEST, None)
        _compare_names(folder, expected, files)  # 1.
        for name, entry in expected.items():  # 2.
            size = files[name].lstat().st_size
            if size != entry.bytes:
                raise SnapshotDamagedError(f"{folder}: {name} must have {entry.bytes} bytes, found {size}")
        for name, entry in expected.items():  # 3.
            digest = hash_file(files[name]).sha256
            if digest != entry.sha256:
                raise SnapshotDamagedError(f"{folder}: {name} must have SHA-256 {entry.sha256}, found {digest}")


def _compare_names(folder: Path, expected: Mapping[str, FileEntry], found: Mapping[str, Path]) -> None:
    if missing := sorted(expected.keys() - found.keys()):
        raise SnapshotDamagedError(f"{folder}: {missing[0]} is missing, the manifest names it")
    if extra := sorted(found.keys() - expected.keys()):
        raise SnapshotDamagedError(f"{folder}: unexpected file {extra[0]}, the manifest does not name it")


LOCK = "lock"
"""Name of the file by which a folder is locked."""


class FileLock:
    """An exclusive lock, held from construction until `release` or until the process ends.

    The kernel's lock decides, so the file that a dead daemon leaves blocks nothing; the PID in it is only for the error
    message. The file is never removed: otherwise one process could lock a new file while another still holds the old
    one. A process forked without exec shares the lock and holds it until it ends.
    """

    def __init__(self, file: Path, guarded: Path, setting: str, *, folder_mode: int = 0o777) -> None:
        """Take the lock without waiting; create the file and its folder if they are missing.

        Args:
            file: The file that is locked.
            guarded: What only one daemon may write, for messages.
            setting: The setting that names it, for messages.
            folder_mode: Mode of a folder that is created, before the umask.

        Raises:
            StateLockedError: another process holds it.
            SnapshotError: the lock cannot be made there, or the file system does not support locks.
        """
        self._guarded, self._setting = guarded, setting
        self._descriptor: int | None = None
        try:
            file.parent.mkdir(mode=folder_mode, parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            full = is_disk_full(error)
            advice = "free some space on its disk" if full else f"set `{setting}` to a path that this user can write"
            raise SnapshotError(f"{file}: must be writable, found: {error.strerror}; {advice}") from error
        try:
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise StateLockedError(
                    f"{self._guarded} must be used by one daemon only, found it locked by process "
                    f"{_holder(descriptor)}: stop that process, or set another `{self._setting}` for this daemon"
                ) from error
            raise SnapshotError(
                f"{self._guarded}: must be on a file system with locks, found: {error.strerror}; put "
                f"`{self._setting}` on a local disk"
            ) from error
        with suppress(OSError):  # a full disk: the lock is held, and the loop goes on degraded
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class StateLock(FileLock):
    """The lock on a state folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOCK, folder, "state", folder_mode=0o700)


class DeadLetterLock(FileLock):
    """The lock on a file of dead letters: a file beside it."""

    def __init__(self, file: Path) -> None:
        file = file.resolve()
        super().__init__(file.with_name(f"{file.name}.{LOCK}"), file, "dead_letters.file", folder_mode=0o700)


def _holder(descriptor: int) -> str:
    """The PID in the file; unknown until the holder has written it."""
    return os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "(unknown)"
