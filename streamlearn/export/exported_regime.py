"""What an export says about itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from streamlearn.export.holdout_figures import HoldoutFigures
from streamlearn.settings import BackboneSettings

Format = Literal["peft", "gguf", "merged"]
"""A folder that PEFT loads, an adapter of llama.cpp, or backbone and adapter as one model."""


@dataclass(frozen=True)
class BaseModel:
    """The backbone, as users of the export find it."""

    name: str
    """A hub id or a folder."""
    revision: str | None

    @classmethod
    def of(cls, settings: BackboneSettings, folder: Path, *, name: str | None = None) -> Self:
        """The backbone's hub id, or the `folder` that it was loaded from; `name` replaces both."""
        if name is not None:
            return cls(name, None)
        return cls(settings.model if settings.revision else str(folder), settings.revision)


@dataclass(frozen=True)
class ExportedRegime:
    """One regime of one snapshot."""

    name: str
    """Of its folder, for example regime-3."""
    regime: int | None
    """Its number; None for the one adapter that all regimes share."""
    label: str
    """Its name, for people; empty without one."""
    snapshot: str
    written: str
    """When the snapshot was, ISO 8601."""
    records: int
    """Of the regime, up to the snapshot."""
    visits: int
    """Times that the stream came to it."""
    base: BaseModel
    form: Format
    dtype: str
    """What the daemon computes in; a merged model is stored in it."""
    computed_in: str
    """The dtype in which `figures` were computed."""
    rank: int
    alpha: float
    num_linears: int
    is_approximate: bool
    """Whether experts among which tokens choose were replaced by their mean."""
    figures: HoldoutFigures | None
    """None without hold-out records."""

    @property
    def fidelity(self) -> str:
        """How it relates to the daemon's experts."""
        if self.is_approximate:
            return "approximate: each expert applies with its mean weight, where the daemon's tokens choose one"
        if self.form == "merged" and self.dtype != "float32":
            return f"rounded to {self.dtype}, the dtype of the backbone"
        return "exact"
