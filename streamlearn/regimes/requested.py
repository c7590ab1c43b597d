"""What a request asks to be answered by."""

from typing import Literal

from streamlearn.errors import StreamlearnError

Requested = int | Literal["routed", "backbone"]
"""The regime with this number; what routing finds; or the untouched backbone."""


class UnknownRegimeError(StreamlearnError):
    """No remembered regime has the requested number; the client asks for another."""
