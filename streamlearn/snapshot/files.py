"""The file operations whose order decides what a crash leaves behind.

Everything that must be durable goes through `Files`. Tests replace it with a subclass: one fails at the n-th operation,
another records every operation and enumerates what a power loss may have kept.
"""

import errno
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError


class Files:
    """The real file system. Each method raises OSError and leaves the translation to its caller."""

    mode = 0o600
    """Of the files that it creates, less the umask: the state of a run has records in it."""

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
    """Files that other users may read, as far as the umask lets them: what is published."""

    mode = 0o666


_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether this error or what caused it says so; safetensors' own errors hold the number in their text."""
    if isinstance(error, SafetensorError) and any(f"(os error {number})" in str(error) for number in _FULL):
        return True
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return error is not None and is_disk_full(error.__cause__)
