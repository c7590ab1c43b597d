"""Tensors in one safetensors file: names, dtypes and shapes in its header, no code in it, and a bound on the header."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamlearn.errors import SnapshotDamagedError, SnapshotError

MAX_HEADER_BYTES = 8 << 20
"""Largest header, bytes: some 80,000 tensors. A planted file cannot make start-up parse gigabytes of JSON."""

_LENGTH_BYTES = 8  # a safetensors file begins with its header's length, little-endian


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Create `path` from tensors on any device. Not durable yet. Those that share memory come back apart.

    Raises:
        SafetensorError: the disk is full or broken.
        SnapshotError: the header is so large that reading would refuse it.
    """
    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        dense = (
            tensor.detach().cpu().contiguous()
        )  # safetensors knows no strides; copies where there are some, or a GPU
        storage = dense.untyped_storage().data_ptr()
        plain[name] = dense.clone() if storage in storages else dense  # safetensors refuses shared memory
        storages.add(storage)
    save_file(plain, path)
    length = header_bytes(path)
    if length > MAX_HEADER_BYTES:
        raise SnapshotError(
            f"{path.name} must have a header of at most {MAX_HEADER_BYTES} bytes, found {length} for {len(plain)} "
            "tensors: join small ones"
        )


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of `path`, on the CPU and in memory of their own: the file may go away.

    Raises:
        SnapshotDamagedError: it is not the safetensors file that it should be.
    """
    check_header(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # A tensor is a view of the mapped file; a late read error there would kill the process with SIGBUS.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  not a dict
    except SafetensorError as error:
        raise SnapshotDamagedError(f"{path}: a safetensors file must stand here, found: {error}") from error


def header_bytes(path: Path) -> int:
    """The header's length as the file states it. Raises OSError."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(_LENGTH_BYTES), "little")


def check_header(path: Path) -> None:
    """Refuse a header that is larger than any of ours.

    Raises:
        SnapshotDamagedError: it is.
    """
    length = header_bytes(path)
    if length > MAX_HEADER_BYTES:
        raise SnapshotDamagedError(f"{path}: its header must have at most {MAX_HEADER_BYTES} bytes, found {length}")
