"""The list of models."""

from collections.abc import Iterable
from typing import Literal

from streamlearn.openai_api.schema import OpenAISchema


class ModelCard(OpenAISchema):
    """One model that a request may name."""

    id: str
    """Its name."""
    object: Literal["model"] = "model"
    """Type of the object."""
    created: int
    """Unix time, in seconds."""
    owned_by: str = "streamlearn"
    """Who serves it."""


class ModelList(OpenAISchema):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    """Type of the object."""
    data: tuple[ModelCard, ...]
    """The models."""

    @classmethod
    def of(cls, names: Iterable[str], created: int) -> "ModelList":
        """The list of models with these names, all created at the same time."""
        return cls(data=tuple(ModelCard(id=name, created=created) for name in names))
