"""One snapshot folder: its summary, its content, and the check that it is what was written."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from streamlearn.errors import SnapshotDamagedError
from streamlearn.snapshot import tensors as tensor_file
from streamlearn.snapshot.contents import (
    ADAPTER,
    MANIFEST,
    OPTIMIZER,
    STATE,
    compare,
    read_bounded,
    reading,
)
from streamlearn.snapshot.manifest import MAX_BYTES, Manifest
from streamlearn.stream.record import Position


@dataclass(frozen=True)
class SnapshotInfo:
    """The summary of a snapshot."""

    name: str
    step: int
    created_at: str
    bytes: int
    position: Position

    @classmethod
    def of(cls, manifest: Manifest) -> "SnapshotInfo":
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
            return tensor_file.read(path)


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
            tensor_file.check_header(path)
    return manifest


def _tensor_files(folder: Path) -> list[Path]:
    return [folder / STATE, *sorted((folder / OPTIMIZER).glob("*.safetensors"))]
