"""A part of a snapshot: files that are written together, or linked from an earlier snapshot while they are the same."""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamlearn import codec
from streamlearn.errors import SnapshotDamagedError, SnapshotError, SnapshotMismatchError
from streamlearn.snapshot.files import Files, compare, read_bounded, reading
from streamlearn.snapshot.manifest import MANIFEST, MAX_BYTES, FileEntry, Manifest
from streamlearn.stream.position import Position

T = TypeVar("T")
ADAPTER = "adapter"
STATE = "state.safetensors"
OPTIMIZER = "optimizer"
"""Folder with the optimizer's state of each regime's adapter; without such adapters it is in `STATE`."""

MAX_HEADER_BYTES = 8 << 20
"""Maximum header size in bytes, enough for some 80,000 tensors. It stops a planted file from making start-up parse
gigabytes of JSON."""

_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, little-endian


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Create `path` from tensors on any device. Not durable yet. Tensors that share memory are stored separately.

    Raises:
        SafetensorError: the disk is full or broken.
        SnapshotError: the header is too large to be read back.
    """
    dense: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        contiguous = tensor.detach().cpu().contiguous()  # safetensors has no strides; this copies only where needed
        storage = contiguous.untyped_storage().data_ptr()
        dense[name] = contiguous.clone() if storage in storages else contiguous  # safetensors refuses shared memory
        storages.add(storage)
    save_file(dense, path)
    length = _header_bytes(path)
    if length > MAX_HEADER_BYTES:
        raise SnapshotError(
            f"{path.name} must have a header of at most {MAX_HEADER_BYTES} bytes, found {length} for {len(dense)} "
            "tensors: join small tensors"
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of `path`, copied into CPU memory: they stay valid when the file is removed.

    Raises:
        SnapshotDamagedError: the file is not a valid safetensors file.
    """
    check_header(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # A tensor is a view of the mapped file; a late read error there would kill the process with SIGBUS.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  not a dict
    except SafetensorError as error:
        raise SnapshotDamagedError(f"{path}: expected a safetensors file, found: {error}") from error


def _header_bytes(path: Path) -> int:
    """Return the header's length as stated in the file. Raises OSError."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(_LENGTH_BYTES), "little")


def read_arrays(path: Path, prefix: str) -> dict[str, NDArray[Any]]:
    """Read the arrays whose names begin with `prefix`, which is left out. Raises like `Snapshot.weights`."""
    with reading(path):
        check_header(path)
        try:
            with safe_open(path, framework="numpy") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  not a dict
                return {name.removeprefix(prefix): np.array(file.get_tensor(name)) for name in names}
        except SafetensorError as error:
            raise SnapshotDamagedError(f"{path}: expected a safetensors file, found: {error}") from error


def check_header(path: Path) -> None:
    """Check the header's stated length before anything parses it.

    Raises:
        SnapshotDamagedError: the header is larger than `MAX_HEADER_BYTES`.
    """
    length = _header_bytes(path)
    if length > MAX_HEADER_BYTES:
        raise SnapshotDamagedError(f"{path}: the header must have at most {MAX_HEADER_BYTES} bytes, found {length}")


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

    def tensors(self) -> dict[str, Tensor]:
        """Read the tensors of `STATE` into CPU memory. Raises like `weights`."""
        return self._read(self.path / STATE)

    def component(self, name: str, kind: type[T]) -> T:
        """Read one component of the state, which `state_part` wrote.

        Raises:
            SnapshotMismatchError: it has other fields than `kind`; another release wrote it.
            SnapshotError: see `weights`.
        """
        try:
            return codec.load(kind, read_arrays(self.path / STATE, f"{name}."), self.manifest.components[name])
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
        return self._read(self.adapter / adapter / "adapter_model.safetensors")

    def moments(self, adapter: str) -> dict[str, Tensor]:
        """Read the optimizer's state of one of `adapters`. Raises like `weights`."""
        return self._read(self.path / OPTIMIZER / f"{adapter}.safetensors")

    @staticmethod
    def _read(path: Path) -> dict[str, Tensor]:
        with reading(path):
            return read_tensors(path)


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
    """Verify a snapshot folder and return its manifest.

    1. The manifest against its seal.
    2. Every other file against the manifest.
    3. The length of each tensor file's header, before anything parses it.

    Raises:
        SnapshotDamagedError: names the file, what was expected and what was found.
        SnapshotError: this process cannot read it.
        SnapshotMismatchError: the manifest has another format.
    """
    manifest = read_manifest(folder)  # 1.
    compare(folder, manifest.files)  # 2.
    for path in _tensor_files(folder):  # 3.
        with reading(path):
            check_header(path)
    return manifest


def _tensor_files(folder: Path) -> list[Path]:
    return [folder / STATE, *sorted((folder / OPTIMIZER).glob("*.safetensors"))]
