"""What a request asks to be answered by."""

from typing import Literal

Requested = int | Literal["routed", "backbone"]
"""The regime with this number; what routing finds; or the untouched backbone."""
