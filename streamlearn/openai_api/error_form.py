"""Errors in OpenAI's form, as an OpenAPI document describes them; `http.replies` writes them.

{"error": {"message": "...", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}}
"""

from typing import Literal

from streamlearn.openai_api.schema import OpenAISchema


class OpenAIErrorDetail(OpenAISchema):
    """Description of an error."""

    message: str
    """What was expected, what was found, and what to do."""
    type: Literal["invalid_request_error", "server_error"]
    """invalid_request_error: change the request; server_error: try again later."""
    param: str | None
    """The field that is wrong."""
    code: str | None
    """Stable identifier for programs, for example model_not_found."""


class OpenAIErrorBody(OpenAISchema):
    """Body of every error on the paths of OpenAI's API."""

    error: OpenAIErrorDetail
    """The error."""
