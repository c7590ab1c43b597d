"""What must be known after a restart: `track.json` in the state folder."""

import threading
import uuid
from pathlib import Path
from typing import Any

import orjson

from streamlearn.errors import ConfigError
from streamlearn.snapshot.files import Files

NAME = "track.json"


class TrackFile:
    """The newest step that each tracker may have written, and what it calls the run. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read the file; without one the run is new.

        Raises:
            ConfigError: it is damaged.
        """
        self._path = folder / NAME
        self._files = Files()
        self._lock = threading.Lock()
        try:
            self._values: dict[str, Any] = orjson.loads(self._path.read_bytes())
            self.run = str(self._values["run"])
        except FileNotFoundError:
            self.run = uuid.uuid4().hex
            self._values = {"run": self.run}
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._path} must name the tracked run, found {error!r}: remove it, and a new run is begun"
            ) from error

    def get(self, tracker: str, key: str) -> Any:
        """A noted value; None if there is none."""
        with self._lock:
            return self._values.get(tracker, {}).get(key)

    def note(self, tracker: str, **values: Any) -> None:
        """Note values; durable when this returns. Raises OSError."""
        with self._lock:
            before = self._values.get(tracker, {})
            if before | values == before:
                return
            self._values[tracker] = before | values
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.replace(self._path, orjson.dumps(self._values))


def forget_run(folder: Path) -> None:
    """Begin a new run with the next start."""
    (folder / NAME).unlink(missing_ok=True)
