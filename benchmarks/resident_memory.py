"""Resident memory of the process."""

import resource
from pathlib import Path


def peak_mib(*, restart: bool = False) -> float:
    """Return the peak resident memory since the process started, or since the last call with `restart`.

    `restart` has an effect on Linux only.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if restart:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmHWM:")


def resident_mib() -> float:
    """Return the present resident memory; needs Linux."""
    return _status("VmRSS:")


def _status(name: str) -> float:
    """A line of the process's status, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
