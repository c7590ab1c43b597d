"""What is published, as a table for a terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from streamlearn.commands.fitted_table import FittedColumn, FittedTable
from streamlearn.serve.views import PublicationView

_REASONS = {
    "too_few_records": "held back: too few hold-out records",
    "worse_than_backbone": "held back: worse than the backbone",
    "worse_than_published": "held back: worse than the published version",
    "answers_changed": "held back: the answers changed",
    "not_loaded": "held back: no replica could load it",
}


def publication_table(publication: PublicationView) -> RenderableType:
    """Regimes with their published versions and what the gate found, then the replicas."""
    parts: list[RenderableType] = []
    regimes = publication.regimes
    if publication.fault is not None:
        parts.append(Text(f"not published: {publication.fault}", style="yellow"))
    if regimes:
        parts.append(
            FittedTable(
                [
                    FittedColumn("regime", [str(each.number) for each in regimes], 9),
                    FittedColumn("published", [each.version or "-" for each in regimes], 9, is_text=True),
                    FittedColumn(
                        "newest", [_REASONS.get(each.held_back or "", "published") for each in regimes], 8, is_text=True
                    ),
                    FittedColumn("hold-out\nloss", [_number(each.loss) for each in regimes], 6),
                    FittedColumn("of the\npublished", [_number(each.published_loss) for each in regimes], 5),
                    FittedColumn("of the\nbackbone", [_number(each.backbone_loss) for each in regimes], 4),
                    FittedColumn("p", [_number(each.p_value) for each in regimes], 3),
                ],
                title=_title(publication),
                caption="Losses are means over hold-out records, nats per token. Low p: the newest is worse.",
            )
        )
    else:
        parts.append(Text("nothing published yet: the first version follows a snapshot with enough hold-out records"))
    for replica in publication.replicas:
        state = f"{replica.loaded} of {replica.wanted} versions loaded" if replica.is_up else "away"
        parts.append(Text(f"{replica.url}  {state}" + (f": {replica.fault}" if replica.fault else "")))
    return Group(*parts)


def _title(publication: PublicationView) -> str:
    if publication.sequence is None:
        return "publication"
    return f"publication {publication.sequence}, snapshot {publication.snapshot}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
