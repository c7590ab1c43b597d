"""Freed memory goes back to the system."""

import sys

import pytest
import torch

from streamlearn.bench.resident_memory import resident_mib
from streamlearn.runtime.heap import return_freed_memory


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
