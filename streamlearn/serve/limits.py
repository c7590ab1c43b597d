"""Configured limits on what a request may ask for."""

from streamlearn.http.replies import ApiError


def require_at_most(limit: int, found: int, *, field: str, setting: str) -> int:
    """Return `found`.

    Raises:
        ApiError: 422 when it is more than `limit`, which `serve.{setting}` sets.
    """
    if found > limit:
        message = f"{field}: expected at most {limit}, found {found}"
        raise ApiError(422, "invalid", message, hint=f"request fewer, or raise serve.{setting}", param=field)
    return found
