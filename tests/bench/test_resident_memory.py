"""Peak memory."""

import sys

import pytest

from streamlearn.bench.resident_memory import peak_mib

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be restarted on Linux only")
def test_a_restart_forgets_an_earlier_peak() -> None:
    """A freed allocation counts until the restart."""
    before = peak_mib(restart=True)
    data = bytearray(b"\1" * (64 * MIB))
    del data
    assert peak_mib() > before + 60
    peak_mib(restart=True)
    assert peak_mib() < before + 30
