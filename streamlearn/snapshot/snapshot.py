"""One snapshot folder: what it is, at a glance and whole, and whether it is what was written."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from streamlearn.errors import SnapshotDamagedError
from streamlearn.snapshot import tensors as tensor_file
from streamlearn.snapshot.contents import ADAPTER, MANIFEST, STATE, compare, read_bounded, reading
from streamlearn.snapshot.manifest import MAX_BYTES, Manifest
from streamlearn.stream.record import Position


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot at a glance."""

    name: str
    step: int
    created_at: str
    bytes: int
    position: Position

    @classmethod
    def of(cls, manifest: Manifest) -> "SnapshotInfo":
        """What the manifest says; `bytes` leaves the manifest itself out."""
        size = sum(entry.bytes for entry in manifest.files.values())
        return cls(snapshot_name(manifest.step), manifest.step, manifest.created_at, size, manifest.position)


@dataclass(frozen=True)
class Snapshot:
    """One verified snapshot on disk."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """Its step, 8 digits or more."""
        return self.path.name

    @property
    def adapter(self) -> Path:
        """A PEFT folder."""
        return self.path / ADAPTER

    def tensors(self) -> dict[str, Tensor]:
        """Read `state.safetensors` into memory, on the CPU.

        Raises:
            SnapshotDamagedError: it changed since it was verified.
            SnapshotError: it cannot be read.
        """
        with reading(self.path / STATE):
            return tensor_file.read(self.path / STATE)


def snapshot_name(step: int) -> str:
    """The one name of a step's snapshot."""
    return f"{step:08d}"


def read_manifest(folder: Path) -> Manifest:
    """The sealed manifest of a snapshot folder, the other files unread.

    Raises:
        SnapshotDamagedError: it is not what was written, or not this step's.
        SnapshotError: this process cannot read it.
        SnapshotMismatchError: it has another format.
    """
    if folder.is_symlink():
        raise SnapshotDamagedError(f"{folder}: a folder must stand here, found a link")
    manifest = Manifest.from_bytes(read_bounded(folder / MANIFEST, MAX_BYTES), where=str(folder / MANIFEST))
    if snapshot_name(manifest.step) != folder.name:
        raise SnapshotDamagedError(f"{folder}: step {folder.name} must be in it, found step {manifest.step}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Hold every file of a snapshot folder against its manifest, and the manifest against its seal.

    Raises:
        SnapshotDamagedError: names the file, what must stand there and what was found.
        SnapshotError: this process cannot read it.
        SnapshotMismatchError: the manifest has another format.
    """
    manifest = read_manifest(folder)
    compare(folder, manifest.files)
    with reading(folder / STATE):
        tensor_file.check_header(folder / STATE)
    return manifest
