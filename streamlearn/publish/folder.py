"""The files of a published folder besides `publication.json`: versions, routing states, the tokenizer.

    adapters/NAME-regime-3@184-5d3c1f/    a version of run 5d3c1f...: PEFT folder, model card, version.json
    routing/184.safetensors               a routing state
    tokenizer-3f2a9c01/                   the backbone's tokenizer and its tokens' vectors, named by their content
    history.jsonl                         every version ever written, one per line: a name is never used again
    lock                                  held by the daemon that writes the folder

Versions, routing states and tokenizers are fsynced, then appear by one rename, and never change. `prune` removes what
no publication names any more.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError

from streamlearn.backbone.lora import PlainLora
from streamlearn.errors import PublicationError
from streamlearn.export.formats import BaseModel, read_peft, write_peft
from streamlearn.publish.publication import (
    ADAPTERS,
    ROUTING,
    RUN_LETTERS,
    TOKENIZER,
    VERSION_FILE,
    Version,
    routing_bytes,
)
from streamlearn.snapshot.files import Files, SharedFiles, list_tree, share

HISTORY = "history.jsonl"
_STAGING = ".staging-"


class PublicationFiles:
    """A published folder, written by one daemon. Its methods raise PublicationError when the disk is full or broken."""

    def __init__(self, folder: Path, base: BaseModel, files: Files | None = None) -> None:
        """Create what is missing, and remove what a killed process left incomplete.

        `base` is the backbone that versions belong to.
        """
        self.folder = folder
        self._base = base
        self.files = files or SharedFiles()
        with _translated(folder):
            for path in (folder / ADAPTERS, folder / ROUTING):
                path.mkdir(parents=True, exist_ok=True)
            for leftover in [*folder.glob(f"{_STAGING}*"), *folder.glob(f"*/{_STAGING}*")]:
                self.files.remove(leftover)
            written = [path.name for path in self._version_folders()]
        self._used = dict.fromkeys(written, -1) | _names(folder / HISTORY)
        """Position of every version in the history, by name; -1 if its line there was lost."""

    def path(self, name: str) -> Path:
        """The folder of a version."""
        return self.folder / ADAPTERS / name

    def versions(self) -> list[Version]:
        """Complete versions in the folder, oldest first."""
        with _translated(self.folder):
            complete = [path for path in self._version_folders() if (path / VERSION_FILE).is_file()]
            complete.sort(key=lambda path: self._used.get(path.name, -1))
        return [Version.read(path) for path in complete]

    def unused_name(self, model: str, step: int, run: str) -> str:
        """`MODEL@STEP-RUN`, or the first with r2, r3, ... after it that was never used: servers cache weights by name.

        A step comes again after a rollback. Its run tells a version from those of other runs with the same model.
        """
        first = name = f"{model}@{step}-{run[:RUN_LETTERS]}"
        number = 1
        while name in self._used:
            number += 1
            name = f"{first}r{number}"
        return name

    def newest_names(self, number: int, *, run: str) -> list[str]:
        """Names of the newest `number` versions of each regime of a run."""
        by_regime: dict[int, list[str]] = {}
        for version in self.versions():
            if version.run == run:
                by_regime.setdefault(version.regime, []).append(version.name)
        return [name for names in by_regime.values() for name in names[-number:]]

    def write_version(self, version: Version, lora: PlainLora, card: str) -> None:
        """Write a version.

        1. Its line in the history is durable: from here on its name is used.
        2. Its folder appears.
        """
        _append(self.folder / HISTORY, orjson.dumps(version.model_dump(mode="json", exclude={"holdout"})))  # 1.
        self._used[version.name] = len(self._used)

        def write(staging: Path) -> None:
            write_peft(staging, lora, self._base)
            (staging / "README.md").write_text(card, encoding="utf-8")
            (staging / VERSION_FILE).write_bytes(version.to_bytes())

        self._write_folder(self.path(version.name), write)  # 2.

    def lora(self, name: str) -> PlainLora:
        """Read the weights of a version, without the start."""
        return read_peft(self.path(name), self._base)

    def write_routing(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> str:
        """Write a routing state and return its path in the folder."""
        number, target = 1, self.folder / ROUTING / f"{step}.safetensors"
        while target.exists():
            number += 1
            target = target.with_name(f"{step}r{number}.safetensors")
        staging = target.with_name(_STAGING + target.name)
        with _translated(target):
            staging.unlink(missing_ok=True)
            self.files.write(staging, routing_bytes(arrays))
            self.files.sync(staging)
            self.files.rename(staging, target)
            self.files.sync(target.parent)
        return f"{ROUTING}/{target.name}"

    def write_tokenizer(self, save: Callable[[Path], object]) -> str:
        """Write the tokenizer, unless it is there already, and return its path in the folder."""
        staging = self.folder / f"{_STAGING}tokenizer"
        with _translated(staging):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            save(staging)
            hashed = hashlib.sha256()
            for name, path in sorted(list_tree(staging)[0].items()):
                hashed.update(name.encode() + b"\0" + path.read_bytes())
            target = self.folder / f"{TOKENIZER}{hashed.hexdigest()[:8]}"
            if target.exists():
                self.files.remove(staging)
            else:
                self._make_durable(staging, target)
        return target.name

    def prune(self, versions: Collection[str], routing: Collection[str]) -> None:
        """Remove all versions and all routing states but these."""
        with _translated(self.folder):
            for path in self._version_folders():
                if path.name not in versions:
                    self.files.remove(path)
            for path in (self.folder / ROUTING).iterdir():
                if f"{ROUTING}/{path.name}" not in routing:
                    self.files.remove(path)

    def _version_folders(self) -> list[Path]:
        return [path for path in (self.folder / ADAPTERS).iterdir() if not path.name.startswith(_STAGING)]

    def _write_folder(self, target: Path, write: Callable[[Path], None]) -> None:
        staging = target.with_name(_STAGING + target.name)
        with _translated(target):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            write(staging)
            self._make_durable(staging, target)

    def _make_durable(self, staging: Path, target: Path) -> None:
        share(staging)
        files, folders = list_tree(staging)
        for path in [*files.values(), *folders]:
            self.files.sync(path)
        self.files.rename(staging, target)
        self.files.sync(target.parent)


def check_folder(folder: Path) -> None:
    """Check that a daemon of this user could write to the folder, or create it. Changes nothing.

    Raises:
        PublicationError: it could not.
    """
    with _translated(folder):
        for path in (folder, folder / ADAPTERS, folder / ROUTING, folder / HISTORY):
            nearest = next(parent for parent in (path, *path.parents) if parent.exists())
            is_history = nearest.name == HISTORY
            if not (nearest.is_dir() or is_history):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
            if not os.access(nearest, os.R_OK | os.W_OK | (0 if is_history else os.X_OK)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


def _append(history: Path, line: bytes) -> None:
    """Append a line durably. One that was cut off is ended first, so that it spoils no other."""
    with _translated(history), history.open("a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        is_cut_off = file.read() not in (b"", b"\n")
        file.write((b"\n" if is_cut_off else b"") + line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _names(history: Path) -> dict[str, int]:
    """The names in the history, by position.

    A line that was cut off, by a crash or a full disk, belongs to a version that was not written.
    """
    names: dict[str, int] = {}
    with _translated(history):
        lines = history.read_bytes().splitlines() if history.exists() else []
    for line in lines:
        with suppress(orjson.JSONDecodeError, KeyError, TypeError):
            names[str(orjson.loads(line)["name"])] = len(names)
    return names


@contextmanager
def _translated(where: Path) -> Iterator[None]:
    """Translate errors of the disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        path = getattr(error, "filename", None) or where
        raise PublicationError(
            f"{path}: must be writable, found: {error}; check the disk and the permissions of publish.folder"
        ) from error
