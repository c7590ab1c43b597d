"""The memory that a process may use."""

from pathlib import Path

import torch

from streamlearn.cli.doctor import cgroup_limits, total_memory


def test_the_limits_of_all_cgroups_above_are_found(tmp_path: Path) -> None:
    """`max` is no limit, and a group without the file has none."""
    processes = tmp_path / "cgroup"
    processes.write_text("1:name=systemd:/old\n0::/system.slice/streamlearn.service\n")
    service = tmp_path / "fs/system.slice/streamlearn.service"
    service.mkdir(parents=True)
    (service / "memory.max").write_text("2000\n")
    (service.parent / "memory.max").write_text("max\n")
    assert list(cgroup_limits(processes, tmp_path / "fs")) == [2000]
    (tmp_path / "fs/memory.max").write_text("1000\n")
    assert sorted(cgroup_limits(processes, tmp_path / "fs")) == [1000, 2000]


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    """Another system, or version 1."""
    assert list(cgroup_limits(tmp_path / "absent", tmp_path)) == []


def test_the_cpu_has_memory() -> None:
    """At least what this test runs in."""
    assert total_memory(torch.device("cpu")) > 1 << 28
