"""The export command: regimes of a snapshot, for programs that serve models."""

from collections.abc import Sequence
from pathlib import Path

from streamlearn.commands.fitted_table import FittedColumn, FittedTable
from streamlearn.commands.restored_model import restored_model
from streamlearn.export.exported_regime import BaseModel, ExportedRegime, Format
from streamlearn.export.exporter import Exporter, ExportOptions
from streamlearn.settings import Settings


def export(
    settings: Settings,
    *,
    snapshot: str,
    regimes: Sequence[int],
    out: Path,
    form: Format,
    base: str | None,
    approximate: bool,
) -> list[ExportedRegime]:
    """Write regimes of a snapshot, all if none is named, each into a folder in `out`. Safe beside a running daemon.

    Raises:
        UsageError: there is no such regime, its folder exists, or it cannot be written without loss.
        SnapshotError: there is no snapshot, it is damaged, or a folder cannot be written.
        ConfigError: there is no snapshot of this name, it belongs to another backbone, adapter or configuration, or the
            format does not know the backbone.
    """
    with restored_model(settings, snapshot, same_dtype=False) as restored:
        found = BaseModel.of(restored.settings.backbone, restored.shape.folder, name=base)
        options = ExportOptions(out, form, found, approximate=approximate)
        exporter = Exporter(
            restored.model.learner,
            restored.model.adaptation,
            restored.snapshot.manifest,
            restored.shape,
            restored.settings,
            options,
        )
        return [exporter.export(slot) for slot in exporter.slots(regimes)]


def table(exported: Sequence[ExportedRegime]) -> FittedTable:
    """One row per folder; losses are on the hold-out records."""
    figures = [each.figures for each in exported]
    return FittedTable(
        [
            FittedColumn("folder", [each.name for each in exported], 9, is_text=True),
            FittedColumn("records", [f"{each.records:,}" for each in exported], 2),
            FittedColumn("rank", [str(each.rank) for each in exported], 1),
            FittedColumn("hold-out", [str(each.records) if each else "0" for each in figures], 3),
            FittedColumn("loss", [f"{each.loss:.3f}" if each else "-" for each in figures], 8),
            FittedColumn("backbone's", [f"{each.backbone_loss:.3f}" if each else "-" for each in figures], 7),
            FittedColumn("KL", [f"{each.divergence:.1e}" if each else "-" for each in figures], 6),
        ]
    )
