"""Freed memory goes back to the system."""

import subprocess
import sys

import pytest
import torch

from benchmarks.measuring import resident_mib
from streamlearn.daemon.process import return_freed_memory


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps it")
def test_what_lies_between_tensors_in_use_is_returned() -> None:
    """Every other one of many small tensors is freed: without the call their memory stays resident."""
    tensors = [torch.ones(16_384) for _ in range(8000)]  # 500 MB
    kept = tensors[::2]
    full = resident_mib()
    del tensors
    return_freed_memory()
    assert resident_mib() < full - 150
    assert all(bool((each == 1).all()) for each in kept[:10])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps it")
def test_tensors_are_returned_one_by_one() -> None:
    """In a process of its own, since it cannot be undone."""
    program = """
import torch
from benchmarks.measuring import resident_mib
from streamlearn.runtime.heap import return_freed_tensors
return_freed_tensors()
tensors = [torch.ones(1 << 19) for _ in range(200)]  # 400 MB, each of which glibc would take from its heap
kept = tensors[::2]
full = resident_mib()
del tensors
print(full - resident_mib())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert float(done.stdout) > 150
