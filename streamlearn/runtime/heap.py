"""Giving freed memory back to the system.

Records differ in length, so the tensors of each step have other sizes, and glibc keeps the memory of the old ones in
pieces: with 56 regimes on the bundled model the daemon had 2.3 GB resident, of which 1.3 GB were in use. It is returned
after each snapshot and after loading, because of limits such as systemd's `MemoryMax`.
"""

import ctypes
import sys


def return_freed_memory() -> None:
    """Return it. Takes milliseconds; only glibc can, elsewhere nothing happens."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
