"""The few operations whose order decides what a crash leaves behind.

Everything that must be durable goes through `Files`. Tests put a subclass in its place: one that fails at the n-th
operation, and one that records them all and enumerates what a power loss may have kept.
"""

import os
import shutil
from pathlib import Path


class Files:
    """The real file system. Each method raises OSError and leaves it to its caller to translate."""

    def make_folder(self, path: Path) -> None:
        """Create one folder, which must not exist, for its owner's eyes alone."""
        path.mkdir(mode=0o700)

    def write(self, path: Path, data: bytes) -> None:
        """Create one file, which must not exist, with this content. Nothing of it is durable before `sync`."""
        with path.open("xb") as file:
            file.write(data)

    def sync(self, path: Path) -> None:
        """Make a file's content durable, or a folder's entries: new names, renames and removals in it.

        One that failed must not be tried again on the same file: the kernel may have dropped the unwritten pages and
        marked them clean, so that a second try succeeds and means nothing. Write a new file instead.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give `old` the name `new`, atomically; a file or an empty folder of that name is replaced."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all that it holds. Not atomic: rename what has a meaning away first."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
