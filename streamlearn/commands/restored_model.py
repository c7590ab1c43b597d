"""The model of a snapshot, for commands that use one without a daemon."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from streamlearn.adapters.check import check
from streamlearn.backbone.load import Outline, identity, outline
from streamlearn.errors import ConfigError, SnapshotError
from streamlearn.runtime.model import Model, adapter_of, adapter_shape
from streamlearn.settings import Settings, fingerprint, with_defaults
from streamlearn.snapshot import compatibility
from streamlearn.snapshot.snapshot import Snapshot
from streamlearn.snapshot.store import SnapshotStore


@dataclass(frozen=True)
class RestoredModel:
    """A snapshot, the model with its state, and what they belong to."""

    model: Model
    snapshot: Snapshot
    shape: Outline
    settings: Settings
    """With the defaults that depend on backbone and adapter."""


@contextmanager
def restored_model(settings: Settings, name: str, *, same_dtype: bool) -> Iterator[RestoredModel]:
    """Load the backbone and a snapshot. Safe while a daemon is running.

    Args:
        settings: The configuration.
        name: The snapshot's, or `newest`.
        same_dtype: Whether to compute in the dtype of the snapshot; if not, `backbone.dtype: auto` chooses the faster
            one on this machine.

    Raises:
        SnapshotError: there is no snapshot, or it is damaged.
        ConfigError: there is none of this name, or it belongs to another backbone, adapter or configuration.
    """
    snapshot = _find(settings, name)
    config, shape = adapter_of(settings), outline(settings.backbone)
    settings = with_defaults(settings, is_vision=shape.is_vision, per_regime=config.per_regime)
    check(config, shape.linears, shape.tower_linears)
    compatibility.check(
        snapshot.manifest,
        fingerprint(settings),
        identity(settings.backbone, shape),
        adapter_shape(config),
        accept=True,
    )
    dtype = snapshot.manifest.dtype if same_dtype else None
    with TemporaryDirectory(prefix="streamlearn-") as folder:
        model = Model(settings, shape, config, dtype, Path(folder) / "resting")
        model.restore(snapshot)
        yield RestoredModel(model, snapshot, shape, settings)


def _find(settings: Settings, name: str) -> Snapshot:
    store = SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)
    names = store.names()
    if not names:
        raise SnapshotError(f"{store.folder}: expected a snapshot, found none; run the daemon first")
    wanted = names[-1] if name == "newest" else name
    if wanted not in names:
        raise ConfigError(f"--snapshot {name}: no such snapshot in {store.folder}, found {', '.join(names)}")
    return store.load(wanted)
