"""The tensor file."""

from pathlib import Path

import pytest
import torch

from streamlearn.errors import SnapshotDamagedError
from streamlearn.snapshot import tensors as tensor_file


def test_a_planted_header_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little"))
    with pytest.raises(SnapshotDamagedError, match="at most 8388608 bytes, found 1099511627776"):
        tensor_file.read(path)


def test_tensors_survive_a_round_trip_bit_for_bit(tmp_path: Path) -> None:
    """Also strided tensors and those that share memory, which are stored separately."""
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    written = {"whole": whole, "transposed": whole.T, "row": whole[1], "scalar": torch.tensor(3)}
    tensor_file.write(tmp_path / "x.safetensors", written)
    found = tensor_file.read(tmp_path / "x.safetensors")
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in written.items())


def test_a_file_that_is_not_safetensors_is_damaged(tmp_path: Path) -> None:
    """The message names the file and what was expected."""
    path = tmp_path / "x.safetensors"
    path.write_bytes((4).to_bytes(8, "little") + b"null")
    with pytest.raises(SnapshotDamagedError, match=r"x\.safetensors: expected a safetensors file, found"):
        tensor_file.read(path)
