"""A state that is small enough to flip every byte of it, and different at each step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamlearn.snapshot.files import Files
from streamlearn.snapshot.manifest import LedgerRow, ManifestDraft
from streamlearn.snapshot.parts import Snapshot, SnapshotInfo, SnapshotPart, adapter_part, optimizer_part, state_part
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.position import Position, TopicPartition

CONFIG = {"seed": 0, "learner": {"lr": 1e-4, "betas": [0.9, 0.95]}, "stream": {"max_tokens": 64}}
BACKBONE = {"model": "builtin:nano", "revision": None, "digest": "3f2a9c"}
ADAPTER = {"preset": "mh-moe", "rank": 4}


def draft(step: int, **changed: Any) -> ManifestDraft:
    """The manifest draft of a daemon at `step`, with four records of one partition per step."""
    values: dict[str, Any] = {
        "step": step,
        "created_at": "2026-01-31T12:00:00+00:00",
        "position": Position({TopicPartition("orders", 0): 4 * step}),
        "ledger": (LedgerRow("orders", 0, 4 * step, 0, 0),),
        "dead_letter_mark": {"bytes": 0},
        "config": CONFIG,
        "backbone": BACKBONE,
        "adapter": ADAPTER,
        "dtype": "float32",
        "versions": {"streamlearn": "0.1.0", "torch": "2.13"},
        "read_ahead": Position({TopicPartition("orders", 0): 4 * step + 2}),
        "regime_changes": 0,
        "components": {"run": {"loss": 1.0 / (step + 3)}},
    }
    return ManifestDraft(**{**values, **changed})


def tensors(step: int) -> dict[str, Tensor]:
    """Optimizer-like state."""
    return {"exp_avg": torch.arange(6.0) * (step + 1), "step": torch.tensor(step)}


def adapter(step: int) -> Callable[[Path], None]:
    """A small version of the files that PEFT writes."""

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "adapter_config.json").write_text(f'{{"r": {step}}}')
        (folder / "adapter_model.safetensors").write_bytes(bytes([step % 251]) * 40)

    return write


def parts(step: int) -> list[SnapshotPart]:
    """The state of `step`; one part of it is the same for four steps each."""
    unchanged = {name: tensor for name, tensor in state(step).items() if name not in tensors(step)}
    return [
        state_part(tensors(step)),
        adapter_part(adapter(step)),
        optimizer_part("regime1", lambda: unchanged, revision=resting(step)),
    ]


def resting(step: int) -> int:
    """The revision, and the values, of the part that changes with every fourth step only."""
    return step // 4


def save(store: SnapshotStore, step: int, **changed: Any) -> SnapshotInfo:
    """Save the state of `step`."""
    return store.save(draft(step, **changed), parts(step))


def state(step: int) -> dict[str, Tensor]:
    """All tensors of `parts`."""
    return {**tensors(step), "resting": torch.full((3,), float(resting(step)))}


def assert_is(
    snapshot: Snapshot | None,
    step: int,
    position: Position | None = None,
    state_of: Callable[[int], dict[str, Tensor]] = state,
) -> None:
    """Assert that the snapshot is that of `step` (and of `position`, if given), complete and bit-equal."""
    assert snapshot is not None
    assert snapshot.manifest.step == step
    assert snapshot.manifest.position == (position or draft(step).position)
    assert (snapshot.adapter / "adapter_config.json").read_text() == f'{{"r": {step}}}'
    assert (snapshot.adapter / "adapter_model.safetensors").read_bytes() == bytes([step % 251]) * 40
    expected = state_of(step)
    loaded = {**snapshot.tensors(), **(snapshot.moments("regime1") if "resting" in expected else {})}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor)  # torch.testing would take a second to import


class FailingFiles(Files):
    """Fails at the n-th operation, or from the n-th on; a failed write leaves the first half of the file."""

    def __init__(self, nth: int, code: int, *, permanently: bool = False) -> None:
        self.left = nth
        self.code = code
        self.permanently = permanently
        self.after_failed_sync: list[Path] = []
        self._failed_sync = False

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0 or (self.left < 0 and self.permanently):
            raise OSError(self.code, "made to fail")

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def write(self, path: Path, data: bytes) -> None:
        try:
            self._count()
        except OSError:
            path.write_bytes(data[: len(data) // 2])
            raise
        super().write(path, data)

    def sync(self, path: Path) -> None:
        if self._failed_sync:
            self.after_failed_sync.append(path)
        try:
            self._count()
        except OSError:
            self._failed_sync = True
            raise

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)
