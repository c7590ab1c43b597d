"""Base class of every section, and checks that several sections share."""

import ipaddress
import re
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


def host_name(name: str) -> str:
    """Return a host name or address as it is compared: in lower case, without brackets.

    >>> host_name("Example.com"), host_name("[::1]")
    ('example.com', '::1')

    Raises:
        ValueError: it is neither, or has a port.
    """
    found = name.strip("[]").lower()
    if not re.fullmatch(r"[a-z0-9._-]+", found) and not _is_address(found):
        raise ValueError(f"expected a host name such as example.com, without scheme and port, found {name!r}")
    return found


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
