"""Peak memory."""

import mmap
import sys

import pytest

from streamlearn.bench.resident_memory import peak_mib

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be restarted on Linux only")
def test_a_restart_forgets_an_earlier_peak() -> None:
    """Memory that was given back counts until the restart; of an allocator's, what it kept may be used again."""
    before = peak_mib(restart=True)
    with mmap.mmap(-1, 64 * MIB) as pages:
        pages.write(b"\1" * len(pages))
    assert peak_mib() > before + 60
    peak_mib(restart=True)
    assert peak_mib() < before + 30
