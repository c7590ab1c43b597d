"""Base class of OpenAI's objects."""

from pydantic import BaseModel, ConfigDict


class OpenAISchema(BaseModel):
    """An object of the API: frozen, further fields are kept, docstrings are the descriptions of fields."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
