"""Names of models: what routing finds, one regime, or the untouched backbone."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from streamlearn.adaptation.requested import Requested

DEFAULT_NAME = "streamlearn"


@dataclass(frozen=True, slots=True)
class NamedModels:
    """The names under one `name`, beside that of the backbone.

    >>> names = NamedModels("streamlearn", "HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> names.requested("streamlearn-regime-3")
    3
    """

    name: str
    """Each prompt is answered by what routing finds for it."""
    backbone: str
    """The untouched backbone."""

    def of_regime(self, number: int) -> str:
        """Name of a regime's model."""
        return f"{self.name}-regime-{number}"

    def of_answer(self, answered_by: str, regime: int | None) -> str:
        """Name of what answered: a regime's model, the backbone, or what no request can name, such as a mean."""
        if answered_by == "backbone":
            return self.backbone
        if answered_by == "regime" and regime is not None:
            return self.of_regime(regime)
        return f"{self.name}-{answered_by}"

    def listed(self, regimes: Iterable[int]) -> list[str]:
        """All names, given the numbers of the regimes."""
        return [self.name, self.backbone, *(self.of_regime(number) for number in regimes)]

    def requested(self, model: str) -> Requested | None:
        """What the name of a model asks for; None for any other name."""
        if model == self.name:
            return "routed"
        if model == self.backbone:
            return "backbone"
        match = re.fullmatch(rf"{re.escape(self.name)}-regime-([1-9][0-9]{{0,17}})", model)
        return int(match[1]) if match else None
