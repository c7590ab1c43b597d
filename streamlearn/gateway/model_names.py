"""The names of models: what a client may ask for, and what it is answered by.

streamlearn                  routed: the regime that explains the prompt, or the backbone
streamlearn-regime-3         the regime's current version, or the backbone while none is published
streamlearn-regime-3@184     this version, while a model server has it
the backbone's own name      the untouched backbone
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from streamlearn.gateway.routed_prompt import RoutedPrompt
from streamlearn.http.replies import ApiError
from streamlearn.publish.publication import Publication, PublishedRegime


class Target(NamedTuple):
    """What answers a request."""

    model: str
    """The name under which model servers serve it: a version, or the backbone."""
    regime: int | None = None
    """Number of the regime that the request belongs to; None if no regime explains it, or it asked for the backbone."""
    score: float | None = None
    """Its score; None if it was not routed."""

    @property
    def unversioned(self) -> str:
        """The model without its version, of which there are few."""
        return self.model.partition("@")[0] if self.regime is not None else self.model


class ModelNames:
    """The names that one publication defines."""

    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self._by_model = {publication.model_of(each): each for each in publication.regimes}

    def is_routed(self, model: str) -> bool:
        """Whether requests for this model are routed."""
        return model == self._publication.name

    def routed(self, found: RoutedPrompt) -> Target:
        """What answers a routed prompt."""
        return self._current(found.regime)._replace(score=found.score)

    def named(self, model: str, served: Iterable[str]) -> Target:
        """What answers a request for a model that is not routed; `served` are the models that model servers have.

        Raises:
            ApiError: 404, there is no such model.
        """
        if model == self._publication.backbone:
            return Target(model)
        if model in self._by_model:
            return self._current(self._by_model[model])
        if model in self._versions(served):
            return Target(model, _number(model))
        raise ApiError(
            404,
            "model_not_found",
            f"the model {model[:200]!r} does not exist",
            hint="GET /v1/models lists those that do",
            param="model",
        )

    def rows(self, served: Iterable[str]) -> list[dict[str, Any]]:
        """The models as OpenAI lists them."""
        own = self._publication
        names = [own.name, own.backbone, *self._by_model, *sorted(self._versions(served))]
        created = int(own.written_at.timestamp())
        return [{"id": name, "object": "model", "created": created, "owned_by": own.name} for name in names]

    def _current(self, regime: PublishedRegime | None) -> Target:
        if regime is None:
            return Target(self._publication.backbone)
        return Target(regime.adapter or self._publication.backbone, regime.number)

    def _versions(self, served: Iterable[str]) -> frozenset[str]:
        """The published versions, and others that model servers still have."""
        return frozenset({*self._publication.adapters, *self._others(served)})

    def _others(self, served: Iterable[str]) -> Iterator[str]:
        prefix = f"{self._publication.name}-regime-"
        for model in served:
            number, at, version = model.removeprefix(prefix).partition("@")
            if model.startswith(prefix) and number.isdecimal() and at and version:
                yield model


def _number(version: str) -> int:
    return int(version.partition("@")[0].rpartition("-")[2])
