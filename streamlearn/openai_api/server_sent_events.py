"""Server-sent events, as OpenAI's clients read them."""

from typing import Any

import orjson
from pydantic import BaseModel

DONE = b"data: [DONE]\n\n"
"""The last event of a complete answer."""
MEDIA_TYPE = "text/event-stream"


def event(content: BaseModel | dict[str, Any]) -> bytes:
    """One event with a JSON object."""
    value = content.model_dump() if isinstance(content, BaseModel) else content
    return b"data: " + orjson.dumps(value) + b"\n\n"
