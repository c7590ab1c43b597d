"""One daemon per state folder."""

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from streamlearn.errors import SnapshotError, StateLockedError

NAME = "lock"


class StateLock:
    """An exclusive lock on a state folder, held from construction until `release` or the process's death.

    The kernel's lock decides, so a dead daemon's file blocks nobody; the PID inside is for the message alone. The
    file is never removed: a newcomer would lock a new file while a third still held the old one. A process forked
    without exec shares the lock and keeps it for as long as it lives.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock, creating the folder when it is missing. Never waits.

        Raises:
            StateLockedError: another process holds it.
            SnapshotError: the folder cannot be written, or its file system has no locks.
        """
        self._path = folder / NAME
        self._descriptor: int | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SnapshotError(
                f"{self._path}: must be writable, found: {error.strerror}; set state to a folder"
            ) from error
        try:
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise StateLockedError(
                    f"{self._path.parent} must belong to one daemon, found it locked by process {_holder(descriptor)}: "
                    "stop that one, or give this one its own state folder"
                ) from error
            raise SnapshotError(f"{self._path}: must be lockable, found: {error.strerror}; use a local disk") from error

    def release(self) -> None:
        """Let the next daemon in. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _holder(descriptor: int) -> str:
    """The PID in the file; unknown in the instant before its holder has written it."""
    return os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "(unknown)"
