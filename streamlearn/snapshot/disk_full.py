"""Whether an error says that a disk, or a quota on it, is full."""

import errno

from safetensors import SafetensorError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether this error or what caused it says so; safetensors' own errors hold the number in their text."""
    if isinstance(error, SafetensorError) and any(f"(os error {number})" in str(error) for number in _FULL):
        return True
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return error is not None and is_disk_full(error.__cause__)
