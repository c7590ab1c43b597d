"""The file that keeps the operator's controls: `controls.json` in the state folder."""

from pathlib import Path

from streamlearn.controls.control_state import VERSION, ControlState, OtherVersionError
from streamlearn.errors import SnapshotError
from streamlearn.snapshot.files import Files

NAME = "controls.json"


class ControlFile:
    """The control state, on disk and in memory. `write` requires the state lock; other processes may `read`."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        """Read the file; without one nothing was asked yet.

        Raises:
            SnapshotError: see `read`.
        """
        self._path = folder / NAME
        self._files = files if files is not None else Files()
        self.state = read(folder)
        """What is durable."""

    def write(self, state: ControlState) -> None:
        """Replace the state atomically; it is durable when this returns.

        Raises:
            SnapshotError: it could not be written; a start may find the old state or the new one.
        """
        if state == self.state:
            return
        try:
            self._files.replace(self._path, state.to_bytes())
        except OSError as error:
            raise SnapshotError(
                f"{self._path}: must be writable, found: {error.strerror}; check the disk's free space and health"
            ) from error
        self.state = state


def read(folder: Path) -> ControlState:
    """Read the control state of a state folder.

    Raises:
        SnapshotError: the file is damaged, of another version, or cannot be read.
    """
    path = folder / NAME
    try:
        return ControlState.from_bytes(path.read_bytes())
    except FileNotFoundError:
        return ControlState()
    except OSError as error:
        raise SnapshotError(f"{path}: must be readable, found: {error.strerror}") from error
    except OtherVersionError as error:
        raise SnapshotError(
            f"{path}: this streamlearn reads version {VERSION}, found version {error}: run the release that wrote it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(
            f"{path}: expected the controls of a run, found {error!r}: restore the file from a backup. If there is "
            "none, move it away, and repeat pause, pins and skipped records as audit.jsonl lists them"
        ) from error
