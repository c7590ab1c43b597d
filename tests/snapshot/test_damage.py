"""Every flipped bit, truncation, extra file and link is detected."""

import os
import random
from pathlib import Path

import pytest

from streamlearn.errors import SnapshotDamagedError
from streamlearn.snapshot.manifest import Manifest
from streamlearn.snapshot.store import SnapshotStore

from .kit import assert_is, save

NAME = "00000002"


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    store = SnapshotStore(tmp_path / "snapshots", keep=2)
    save(store, 1)
    save(store, 2)
    return store


def test_every_bit_flip_of_a_manifest_is_found(store: SnapshotStore) -> None:
    """Every bit of every byte, including whitespace and the digits of the seal."""
    data = bytearray((store.folder / NAME / "manifest.json").read_bytes())
    Manifest.from_bytes(bytes(data), where="m")
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            with pytest.raises(SnapshotDamagedError):
                Manifest.from_bytes(bytes(data), where="m")
            data[index] ^= 1 << bit


def test_every_truncation_of_a_manifest_is_found(store: SnapshotStore) -> None:
    data = (store.folder / NAME / "manifest.json").read_bytes()
    for size in range(len(data)):
        with pytest.raises(SnapshotDamagedError):
            Manifest.from_bytes(data[:size], where="m")


@pytest.mark.parametrize(
    "file", ["state.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "manifest.json"]
)
def test_flips_and_truncations_of_every_file_are_found(store: SnapshotStore, file: str) -> None:
    """A hundred seeded mutations per file, on disk, checked in the same way as at a start."""
    draw = random.Random(file)
    path = store.folder / NAME / file
    whole = path.read_bytes()
    for _ in range(100):
        mutated = bytearray(whole)
        mutated[draw.randrange(len(whole))] ^= draw.randrange(1, 256)
        path.write_bytes(draw.choice([bytes(mutated), whole[: draw.randrange(len(whole))], whole + b"\0"]))
        with pytest.raises(SnapshotDamagedError, match=path.name):
            store.verify(NAME)
    path.write_bytes(whole)
    store.verify(NAME)


def test_the_message_names_the_file_what_was_expected_and_what_was_found(store: SnapshotStore) -> None:
    path = store.folder / NAME / "state.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 3)
    with pytest.raises(SnapshotDamagedError, match=f"state.safetensors must have {size} bytes, found {size - 3}"):
        store.verify(NAME)


def test_sizes_are_compared_before_any_file_is_hashed(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(store.folder / NAME / "state.safetensors", 3)
    monkeypatch.setattr("streamlearn.snapshot.files.hash_file", lambda _: pytest.fail("hashed"))
    with pytest.raises(SnapshotDamagedError, match="bytes, found 3"):
        store.verify(NAME)


@pytest.mark.parametrize("file", ["state.safetensors", "adapter/adapter_config.json", "manifest.json"])
def test_a_missing_file_is_found(store: SnapshotStore, file: str) -> None:
    (store.folder / NAME / file).unlink()
    with pytest.raises(SnapshotDamagedError, match=Path(file).name):
        store.verify(NAME)
    assert_is(store.newest(), 1)


def test_an_extra_file_is_found(store: SnapshotStore) -> None:
    (store.folder / NAME / "adapter" / "extra.bin").write_bytes(b"")
    with pytest.raises(SnapshotDamagedError, match=r"unexpected file adapter/extra\.bin"):
        store.verify(NAME)


@pytest.mark.parametrize("file", ["state.safetensors", "adapter", "manifest.json", "."])
def test_a_link_is_found_even_to_the_right_content(store: SnapshotStore, file: str, tmp_path: Path) -> None:
    path = store.folder / NAME / file
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotDamagedError):
        store.verify(NAME)
    assert_is(store.newest(), 1)


def test_a_snapshot_under_another_steps_name_is_found(store: SnapshotStore) -> None:
    (store.folder / NAME).rename(store.folder / "00000009")
    with pytest.raises(SnapshotDamagedError, match="expected the snapshot of step 00000009, found step 2"):
        store.verify("00000009")
    assert_is(store.newest(), 1)


def test_infos_leave_a_damaged_manifest_out(store: SnapshotStore) -> None:
    (store.folder / NAME / "manifest.json").write_bytes(b"")
    assert [info.step for info in store.infos()] == [1]
