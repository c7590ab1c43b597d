"""Base class of every section, and checks that several sections share."""

import ipaddress
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One package's settings: frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section in a field's annotation (`X` or `X | None`), or None for a plain value."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
