"""The model card of a published version."""

from streamlearn.export import card as export_card
from streamlearn.export.exported_regime import BaseModel, ExportedRegime
from streamlearn.publish.regime_gate import Candidate
from streamlearn.publish.snapshot_regimes import SnapshotRegimes
from streamlearn.publish.version import Version


def card(version: Version, candidate: Candidate, snapshot: SnapshotRegimes, base: BaseModel) -> str:
    """The text of the card."""
    regime, lora, manifest = candidate.regime, candidate.lora, snapshot.snapshot.manifest
    exported = ExportedRegime(
        name=version.name,
        regime=regime.number,
        label=regime.label or "",
        snapshot=snapshot.snapshot.name,
        written=manifest.created_at,
        records=regime.records,
        visits=regime.visits,
        base=base,
        form="peft",
        dtype=manifest.dtype,
        computed_in=manifest.dtype,
        rank=lora.rank,
        alpha=lora.alpha,
        num_linears=len(lora.layers),
        is_approximate=False,
        figures=None,
    )
    figures = [
        f"On {len(version.holdout)} hold-out records, which were never trained on, mean loss of a record:",
        "",
        "| | nats per token |",
        "|---|---|",
        f"| this version | {version.loss:.4f} |",
        f"| untouched backbone | {version.backbone_loss:.4f} |",
        "",
    ]
    return export_card.card(exported, figures)
