"""Base class of every section, and checks that several sections share."""

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

INT64_MAX = 2**63 - 1

Seconds = Annotated[float, Field(gt=0, le=10**9)]
"""A duration of at most 31 years: locks wait for `threading.TIMEOUT_MAX`, 292 years, at most."""
RequestSeconds = Annotated[float, Field(gt=0, le=2 * 10**6)]
"""The timeout of a socket, at most 23 days: poll(2) counts milliseconds in 32 bits."""
Int32 = Annotated[int, Field(gt=0, lt=2**31)]
"""A number that Kafka's protocol has 32 bits for."""


class Section(BaseModel):
    """One package's settings: frozen; unknown keys are errors, a section without a value is absent, numbers are finite.

    Integers fit into 64 bits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_sections(cls, values: Any) -> Any:
        """Leave out sections whose keys are all commented out, which YAML reads as null."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        empty = {key for key, value in values.items() if value is None and key in fields}
        return {key: values[key] for key in values if key not in empty or section_type(fields[key].annotation) is None}

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would read as 1, 0 or the present folder."""
        if isinstance(value, bool) or value == "":
            accepted = plain_types(cls.model_fields[str(info.field_name)].annotation)
            if isinstance(value, bool) and bool not in accepted and accepted & {int, float}:
                raise ValueError(f"expected a number, found {str(value).lower()}")
            if value == "" and Path in accepted:
                raise ValueError("expected a path, found an empty text")
        return value

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > INT64_MAX:
            raise ValueError(f"expected a number of at most {INT64_MAX}")
        return value


def plain_types(annotation: Any) -> set[Any]:
    """The types in a field's annotation, without those of the items of a list."""
    if get_origin(annotation) is Annotated:
        return plain_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set[Any]().union(*map(plain_types, get_args(annotation)))
    return {annotation}


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section in a field's annotation (`X` or `X | None`), or None for a plain value."""
    types = (each for each in plain_types(annotation) if isinstance(each, type))
    return next((each for each in types if issubclass(each, Section)), None)


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


def server_urls(urls: Iterable[str]) -> tuple[str, ...]:
    """Return the URLs of servers without a slash at their ends.

    >>> server_urls(["http://10.0.0.1:8000/"])
    ('http://10.0.0.1:8000',)

    Raises:
        ValueError: one is no URL of a server, or holds more than that, or occurs twice.
    """
    found: list[str] = []
    for url in urls:
        if not _is_server_url(url):
            raise ValueError(
                "expected http://HOST:PORT or https://HOST:PORT without a path, a password or a query, found "
                + shown_server(url)
            )
        found.append(url.rstrip("/"))
        if found[-1] in found[:-1]:
            raise ValueError(f"each server must be named once, found {found[-1]} twice")
    return tuple(found)


def folder_or_store(value: object) -> Path | str:
    """Return a folder's path, or the URL of a place in an object store without a slash at its end.

    >>> folder_or_store("published"), folder_or_store("s3://bucket/adapters/")
    (PosixPath('published'), 's3://bucket/adapters')

    Raises:
        ValueError: it is neither, or a URL that holds more than that, or one of this machine.
    """
    if isinstance(value, str) and "://" in value:
        if value.startswith(("file://", "local://")):
            raise ValueError("expected a folder of this machine as a path, without file://")
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/@?#:]+(/[^\s@?#]*)?", value):
            raise ValueError(
                "expected the URL of an object store such as s3://bucket/prefix, without a password, a port or a "
                f"query, found {shown_server(value)}"
            )
        return value.rstrip("/")
    if not isinstance(value, str | Path):
        raise ValueError("expected a path, or the URL of an object store such as s3://bucket/prefix")
    return Path(value)


FolderOrStore = Annotated[Path | str, BeforeValidator(folder_or_store)]
"""A folder, or the URL of a place in an object store; only the former is a `Path`."""


def check_token(name: str, urls: Iterable[str], allowing: str = "set allow_plaintext: true") -> None:
    """Refuse to send a token, set by `name`, where it could be read: by plain HTTP to another machine."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ValueError(f"{name} is set, but {url} is plain HTTP to another machine: use https, or {allowing}")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def shown_server(url: str) -> str:
    """A wrong URL or host as messages show it: without what may be user information or a query.

    >>> shown_server("http://me:secret@a/?token=secret")
    '...@a/'
    """
    return re.sub(r"(?s).*@", "...@", url).partition("?")[0]


def _is_server_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises on an invalid port
    except ValueError:
        return False
    only_host = parts.username is None and parts.path in ("", "/") and not {"?", "#"} & set(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and only_host


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
