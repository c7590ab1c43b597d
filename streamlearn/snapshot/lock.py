"""The lock that admits one daemon per state folder."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from streamlearn.errors import SnapshotError, StateLockedError
from streamlearn.snapshot.files import is_disk_full

NAME = "lock"


class StateLock:
    """An exclusive lock on a state folder, held from construction until `release` or until the process ends.

    The kernel's lock decides, so the file that a dead daemon leaves blocks nothing; the PID in it is only for the error
    message. The file is never removed: otherwise one process could lock a new file while another still holds the old
    one. A process forked without exec shares the lock and holds it until it ends.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock without waiting; create the folder if it is missing.

        Raises:
            StateLockedError: another process holds it.
            SnapshotError: the lock cannot be made there, or the file system does not support locks.
        """
        self._path = folder / NAME
        self._descriptor: int | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            full = is_disk_full(error)
            advice = "free some space on its disk" if full else "set `state` to a folder that this user can write"
            raise SnapshotError(f"{self._path}: must be writable, found: {error.strerror}; {advice}") from error
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
                    f"{self._path.parent} must be used by one daemon only, found it locked by process "
                    f"{_holder(descriptor)}: stop that process, or set another `state` folder for this daemon"
                ) from error
            raise SnapshotError(
                f"{self._path}: must be on a file system with locks, found: {error.strerror}; put the `state` folder "
                "on a local disk"
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


def _holder(descriptor: int) -> str:
    """The PID in the file; unknown until the holder has written it."""
    return os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "(unknown)"
