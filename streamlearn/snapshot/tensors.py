"""Tensors in one safetensors file: a bounded header with names, dtypes and shapes, and no code."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamlearn.errors import SnapshotDamagedError, SnapshotError

MAX_HEADER_BYTES = 8 << 20
"""Maximum header size in bytes, enough for some 80,000 tensors. It stops a planted file from making start-up parse
gigabytes of JSON."""

_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, little-endian


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
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
    length = header_bytes(path)
    if length > MAX_HEADER_BYTES:
        raise SnapshotError(
            f"{path.name} must have a header of at most {MAX_HEADER_BYTES} bytes, found {length} for {len(dense)} "
            "tensors: join small tensors"
        )


def read(path: Path) -> dict[str, Tensor]:
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


def header_bytes(path: Path) -> int:
    """Return the header's length as stated in the file. Raises OSError."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(_LENGTH_BYTES), "little")


def check_header(path: Path) -> None:
    """Check the header's stated length before anything parses it.

    Raises:
        SnapshotDamagedError: the header is larger than `MAX_HEADER_BYTES`.
    """
    length = header_bytes(path)
    if length > MAX_HEADER_BYTES:
        raise SnapshotDamagedError(f"{path}: the header must have at most {MAX_HEADER_BYTES} bytes, found {length}")
