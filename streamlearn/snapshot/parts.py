"""A part of a snapshot: files that are written together, or linked from an earlier snapshot while they are the same."""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamlearn import codec
from streamlearn.errors import SnapshotDamagedError, SnapshotMismatchError
from streamlearn.snapshot.files import Files, compare, read_bounded, reading
from streamlearn.snapshot.manifest import MANIFEST, MAX_BYTES, FileEntry, Manifest
from streamlearn.stream.position import Position

T = TypeVar("T")
ADAPTER = "adapter"
STATE = "state.safetensors"
OPTIMIZER = "optimizer"
"""Folder with the optimizer's state of each regime's adapter; without such adapters it is in `STATE`."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Create `path` from tensors on any device. Not durable yet. Tensors that share memory are stored separately.

    Raises:
        SafetensorError: the disk is full or broken.
    """
    dense: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        contiguous = tensor.detach().cpu().contiguous()  # safetensors has no strides; this copies only where needed
        storage = contiguous.untyped_storage().data_ptr()
        dense[name] = contiguous.clone() if storage in storages else contiguous  # safetensors refuses shared memory
        storages.add(storage)
    save_file(dense, path)


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, which is left out, copied into CPU memory.

    Raises:
        SnapshotDamagedError: the file is missing, or not a valid safetensors file.
        SnapshotError: this process cannot read it.
    """
    with reading(path):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  not a dict
                # A tensor is a view of the mapped file; a late read error there would kill the process with SIGBUS.
                return {name.removeprefix(prefix): file.get_tensor(name).clone() for name in names}
        except SafetensorError as error:
            raise SnapshotDamagedError(f"{path}: expected a safetensors file, found: {error}") from error


_NOT_LINKABLE = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.ENOENT}
"""The file system has no hard links, or no more of this file, or someone removed the file."""


@dataclass(frozen=True)
class SnapshotPart:
    """One file, or all files below one folder."""

    name: str
    """Path of the file or folder, relative to the snapshot."""
    write: Callable[[Path], None]
    """Creates it at this path, whose parent exists."""
    revision: int | None = None
    """Within one process, equal revisions mean equal content; None: the content may change any time."""


@dataclass(frozen=True)
class WrittenSnapshot:
    """A snapshot that this process wrote: unchanged parts may be linked from it."""

    folder: Path
    manifest: Manifest
    revisions: Mapping[str, int | None]
    """By part."""

    def link(self, part: SnapshotPart, folder: Path, files: Files) -> Mapping[str, FileEntry] | None:
        """Link a part that is unchanged since this snapshot into the folder of another one.

        Returns the entries of its files for the manifest; None if it changed or cannot be linked, and then there is
        nothing of it in `folder`. Raises OSError.
        """
        if part.revision is None or self.revisions.get(part.name) != part.revision:
            return None
        entries = {name: entry for name, entry in self.manifest.files.items() if _is_below(name, part.name)}
        try:
            for name in entries:
                make_parents(folder / name, files)
                files.link(self.folder / name, folder / name)
        except OSError as error:
            if error.errno not in _NOT_LINKABLE:
                raise
            if (folder / part.name).exists():
                files.remove(folder / part.name)
            return None
        return entries


def make_parents(path: Path, files: Files) -> None:
    """Create the missing folders above a path. Raises OSError."""
    if not path.parent.exists():
        make_parents(path.parent, files)
        files.make_folder(path.parent)


def state_part(tensors: Mapping[str, Tensor]) -> SnapshotPart:
    """The part that changes with every step."""
    return SnapshotPart(STATE, lambda path: write_tensors(path, tensors))


def dump_components(components: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, codec.Json]]:
    """Tensors for `state_part`, and JSON for the manifest, of dataclasses by name; see `Snapshot.component`."""
    tensors: dict[str, Tensor] = {}
    json: dict[str, codec.Json] = {}
    for name, component in components.items():
        arrays, json[name] = codec.dump(component)
        tensors |= {
            f"{name}.{array}": torch.from_numpy(np.require(arrays[array], requirements="W")) for array in arrays
        }
    return tensors, json


def adapter_part(write: Callable[[Path], None], *, name: str = "", revision: int | None = None) -> SnapshotPart:
    """A PEFT folder: all of `adapter/`, or one adapter of several below it."""
    return SnapshotPart(f"{ADAPTER}/{name}" if name else ADAPTER, write, revision)


def optimizer_part(name: str, tensors: Callable[[], Mapping[str, Tensor]], *, revision: int) -> SnapshotPart:
    """The optimizer's state of one adapter of several; `tensors` is only called if it is written."""
    return SnapshotPart(f"{OPTIMIZER}/{name}.safetensors", lambda path: write_tensors(path, tensors()), revision)


def _is_below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")


@dataclass(frozen=True)
class SnapshotInfo:
    """The summary of a snapshot."""

    name: str
    step: int
    created_at: str
    bytes: int
    position: Position

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "SnapshotInfo":
        """Summarize a manifest; `bytes` does not count the manifest itself."""
        size = sum(entry.bytes for entry in manifest.files.values())
        return cls(snapshot_name(manifest.step), manifest.step, manifest.created_at, size, manifest.position)


@dataclass(frozen=True)
class Snapshot:
    """One verified snapshot on disk."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """The step, in 8 digits or more."""
        return self.path.name

    @property
    def adapter(self) -> Path:
        """The PEFT adapter folder."""
        return self.path / ADAPTER

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Read the tensors of `STATE` whose names begin with `prefix`, which is left out. Raises like `weights`."""
        return read_tensors(self.path / STATE, prefix)

    def component(self, name: str, kind: type[T]) -> T:
        """Read one component of the state, which `state_part` wrote.

        Raises:
            SnapshotMismatchError: it has other fields than `kind`; another release wrote it.
            SnapshotError: see `weights`.
        """
        arrays = {array: tensor.numpy() for array, tensor in self.tensors(f"{name}.").items()}
        try:
            return codec.load(kind, arrays, self.manifest.components[name])
        except (codec.CodecError, KeyError) as error:
            raise SnapshotMismatchError(
                f"snapshot {self.name}: the state of {name} must have the fields of this release, found {error}: run "
                f"the release that wrote it ({self.manifest.versions.get('streamlearn')}), or start over with --fresh, "
                "which keeps the old snapshots in another folder"
            ) from error

    def adapters(self) -> list[str]:
        """Names of the adapters, where each has its own folder in `adapter/`; else empty."""
        return sorted(path.name for path in self.adapter.iterdir() if path.is_dir())

    def weights(self, adapter: str = "") -> dict[str, Tensor]:
        """Read the weights of one of `adapters`, or where there is only one, its own.

        Raises:
            SnapshotDamagedError: the file changed since it was verified.
            SnapshotError: this process cannot read it.
        """
        return read_tensors(self.adapter / adapter / "adapter_model.safetensors")

    def moments(self, adapter: str) -> dict[str, Tensor]:
        """Read the optimizer's state of one of `adapters`. Raises like `weights`."""
        return read_tensors(self.path / OPTIMIZER / f"{adapter}.safetensors")


def snapshot_name(step: int) -> str:
    """Return the folder name of a step's snapshot."""
    return f"{step:08d}"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a snapshot folder; the other files are not read.

    Raises:
        SnapshotDamagedError: the manifest was changed, or belongs to another step.
        SnapshotError: this process cannot read it.
        SnapshotMismatchError: it has another format.
    """
    if folder.is_symlink():
        raise SnapshotDamagedError(f"{folder}: expected a folder, found a symbolic link")
    manifest = Manifest.from_bytes(read_bounded(folder / MANIFEST, MAX_BYTES), where=str(folder / MANIFEST))
    if snapshot_name(manifest.step) != folder.name:
        raise SnapshotDamagedError(f"{folder}: expected the snapshot of step {folder.name}, found step {manifest.step}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Verify a snapshot folder and return its manifest: first against its seal, then every other file against it.

    Raises:
        SnapshotDamagedError: names the file, what was expected and what was found.
        SnapshotError: this process cannot read it.
        SnapshotMismatchError: the manifest has another format.
    """
    manifest = read_manifest(folder)
    compare(folder, manifest.files)
    return manifest
