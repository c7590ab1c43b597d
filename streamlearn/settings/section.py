"""What every section is, and what several of them check."""

import ipaddress
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One room's settings: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section behind a field's annotation (`X` or `X | None`), or None for a plain value."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
