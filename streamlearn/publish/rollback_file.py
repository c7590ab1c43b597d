"""The step that the run went back to: a file of the state folder, there until no version of a later step is published.

Without it a daemon that ends before it withdrew those versions would take them for its own, once it is past their steps
again.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamlearn.errors import PublicationError
from streamlearn.snapshot.files import Files

FILE = "publish.rolled_back_to"


class RollbackFile:
    """The file. Every method raises PublicationError where the disk is full or broken."""

    def __init__(self, state: Path) -> None:
        self._path = state / FILE
        self._files = Files()

    def read(self) -> float:
        """The step; infinity if nothing is to be withdrawn."""
        with _translated(self._path):
            return int(self._path.read_bytes()) if self._path.exists() else math.inf

    def write(self, step: int) -> None:
        """Note a step, durably."""
        with _translated(self._path):
            self._files.replace(self._path, b"%d\n" % step)

    def remove(self) -> None:
        """Forget the step, if there is one."""
        with _translated(self._path):
            self._path.unlink(missing_ok=True)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate errors of the disk, and of a file that holds no number."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise PublicationError(
            f"{path}: expected a writable file with the step that the run went back to, found: {error}; check the disk "
            "and the permissions of the state folder"
        ) from error
