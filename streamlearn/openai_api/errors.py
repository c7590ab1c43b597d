"""Errors in OpenAI's form.

{"error": {"message": "...", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}}
"""

from typing import Any, Literal

from streamlearn.openai_api.schema import OpenAISchema

ErrorType = Literal["invalid_request_error", "server_error"]


class ErrorDetail(OpenAISchema):
    """Description of an error."""

    message: str
    """What was expected, what was found, and what to do."""
    type: ErrorType
    """invalid_request_error: change the request; server_error: try again later."""
    param: str | None
    """The field that is wrong."""
    code: str | None
    """Stable identifier for programs, for example model_not_found."""


class ErrorBody(OpenAISchema):
    """Body of every error."""

    error: ErrorDetail
    """The error."""


def error_body(status: int, code: str, message: str, *, param: str | None = None) -> dict[str, Any]:
    """The body of an error with this HTTP status."""
    kind: ErrorType = "invalid_request_error" if status < 500 else "server_error"
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code)).model_dump()
