"""Which requests are controls."""

import re

_PATHS = re.compile(
    r"/v1/(?:(?P<run>pause|resume)"
    r"|snapshots/(?P<name>[^/]+)/(?P<snapshot>pin|unpin|rollback)"
    r"|regimes/(?P<number>[^/]+)/(?P<regime>freeze|unfreeze|rename|approve|drop))"
)
MAX_ARGUMENT_CHARS = 100


def control_of(method: str, path: str) -> tuple[str, dict[str, str]] | None:
    """Return the control that a request asks for and the argument in its path; None if it asks for none.

    >>> control_of("POST", "/v1/snapshots/00000042/pin")
    ('pin', {'snapshot': '00000042'})
    >>> control_of("GET", "/v1/pause") is None
    True
    """
    found = _PATHS.fullmatch(path) if method == "POST" else None
    if found is None:
        return None
    if found["run"]:
        return found["run"], {}
    kind, value = ("snapshot", found["name"]) if found["snapshot"] else ("number", found["number"])
    return found["snapshot"] or found["regime"], {kind: value[:MAX_ARGUMENT_CHARS]}
