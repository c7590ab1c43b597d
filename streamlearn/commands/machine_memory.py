"""The memory that a machine, a container or a service may use."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

_CGROUP, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory that a process may use on a device: all of it, or less by the limit of a cgroup."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *cgroup_limits()])


def cgroup_limits(processes: Path = _CGROUP, root: Path = _ROOT) -> Iterator[int]:
    """Yield the memory limits of this process's cgroup (version 2) and of those above it, bytes.

    Args:
        processes: The file that names the process's cgroup.
        root: Where cgroups are mounted.
    """
    try:
        lines = processes.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # no Linux
        return
    for line in lines:
        number, _, path = line.split(":", 2)
        if number == "0":  # version 2; in a container the path is that inside it
            own = Path(path.lstrip("/"))
            for folder in (own, *own.parents):
                yield from _limit(root / folder / "memory.max")


def _limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    if text != "max":
        yield int(text)
