"""A request for a completion: the fields that the gateway reads, and all others, which are forwarded unread."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from streamlearn.gateway.prompt import Prompt, completion_prompts, invalid, messages_prompt
from streamlearn.http.replies import ApiError

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_DEPTH = 254
"""Objects and arrays within one another, the body among them, that orjson writes."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request to `path`, which is CHAT or TEXT."""

    path: str
    model: str
    """The model that the client asks for."""
    stream: bool
    """Whether the answer comes in parts."""
    fields: dict[str, Any]
    """All fields as received."""
    num_bytes: int
    """Size of the body."""

    @classmethod
    def parse(cls, path: str, body: bytes) -> "CompletionRequest":
        """Read a body.

        Raises:
            ApiError: 400, it is not JSON, not an object, or names no model.
        """
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, "not_json", f"the body must be JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ApiError(400, "invalid", "the body must be a JSON object")
        model = fields.get("model")
        if not isinstance(model, str):
            raise invalid("model", "model must be the name of a model; GET /v1/models lists them")
        if not isinstance(fields.get("stream") or False, bool):
            raise invalid("stream", "stream must be true or false")
        return cls(path, model, bool(fields.get("stream")), fields, len(body))

    def prompts(self) -> Sequence[Prompt]:
        """What decides the regime, one per prompt.

        Raises:
            ApiError: 400, a prompt cannot be routed.
        """
        if self.path == CHAT:
            return [messages_prompt(self.fields.get("messages"))]
        return completion_prompts(self.fields.get("prompt"))

    def body_for(self, model: str) -> bytes:
        """The body with another model.

        Raises:
            ApiError: 400, its fields are nested too deeply.
        """
        try:
            return orjson.dumps({**self.fields, "model": model})
        except orjson.JSONEncodeError as error:  # orjson reads four times as deep as it writes
            raise ApiError(400, "invalid", f"the body must be nested at most {MAX_DEPTH} deep") from error
