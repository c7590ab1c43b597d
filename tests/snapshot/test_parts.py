"""Tensors and components of a snapshot."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamlearn.errors import SnapshotDamagedError, SnapshotMismatchError
from streamlearn.snapshot.parts import dump_components, read_tensors, state_part
from streamlearn.snapshot.store import SnapshotStore

from .kit import draft


def test_a_file_that_is_not_safetensors_is_damaged(tmp_path: Path) -> None:
    """The message names the file and what was expected."""
    path = tmp_path / "x.safetensors"
    path.write_bytes((4).to_bytes(8, "little") + b"null")
    with pytest.raises(SnapshotDamagedError, match=r"x\.safetensors: expected a safetensors file, found"):
        read_tensors(path)


@dataclass(eq=False)
class Regime:
    """A record of a component."""

    counts: NDArray[np.float32]
    tokens: NDArray[np.uint16]
    level: float = 0.0


@dataclass(eq=False)
class Regimes:
    """A component."""

    by_slot: dict[int, Regime] = field(default_factory=dict)
    name: str = ""


@dataclass(eq=False)
class NewerRegimes:
    """The component in a release that has one more field and one less."""

    by_slot: dict[int, Regime] = field(default_factory=dict)
    added: int = 7


def saved(folder: Path, component: object) -> SnapshotStore:
    store = SnapshotStore(folder, keep=2)
    tensors, components = dump_components({"regimes": component, "other": Regimes(name="other")})
    store.save(draft(1, components=components), [state_part({**tensors, "weight": torch.ones(2)})])
    return store


def test_a_component_is_a_dataclass_and_is_read_bit_for_bit(tmp_path: Path) -> None:
    """Its arrays lie beside the other tensors, also read-only ones."""
    counts = np.array([np.nan, -0.0, 1e-45], np.float32)
    counts.flags.writeable = False
    regimes = {slot: Regime(counts, np.arange(slot, dtype=np.uint16), float("inf")) for slot in (3, 0)}
    snapshot = saved(tmp_path, Regimes(regimes, "live")).load("00000001")
    loaded = snapshot.component("regimes", Regimes)
    assert [*loaded.by_slot] == [3, 0]
    assert loaded.name == "live"
    assert loaded.by_slot[3].counts.tobytes() == counts.tobytes()
    assert loaded.by_slot[3].tokens.tolist() == [0, 1, 2]
    assert loaded.by_slot[0].level == float("inf")
    assert set(snapshot.tensors()) > {"weight", "regimes.by_slot[].counts", "regimes.by_slot[].tokens[lengths]"}


def test_a_component_with_a_new_field_reads_older_snapshots(tmp_path: Path) -> None:
    loaded = saved(tmp_path, NewerRegimes()).load("00000001").component("regimes", NewerRegimes)
    assert loaded.added == 7


def test_a_component_of_another_release_is_refused_by_name(tmp_path: Path) -> None:
    """The files are intact, so the release differs; the message names the field and what to do."""
    snapshot = saved(tmp_path, Regimes()).load("00000001")
    message = r"state of regimes .* name: unknown field.*run the release.*0\.1\.0"
    with pytest.raises(SnapshotMismatchError, match=message):
        snapshot.component("regimes", NewerRegimes)
    with pytest.raises(SnapshotMismatchError, match="state of losses"):
        snapshot.component("losses", Regimes)
