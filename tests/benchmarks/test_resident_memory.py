"""Peak memory."""

import subprocess
import sys

import pytest

SCRIPT = """
import mmap
from streamlearn.bench.resident_memory import peak_mib

before = peak_mib(restart=True)
with mmap.mmap(-1, 64 << 20) as pages:
    pages.write(b"\\1" * len(pages))
print(peak_mib() - before)
peak_mib(restart=True)
print(peak_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be restarted on Linux only")
def test_a_restart_forgets_an_earlier_peak() -> None:
    """Memory that was given back counts until the restart. In a process of its own, where nothing else changes it."""
    printed = subprocess.check_output([sys.executable, "-c", SCRIPT], text=True)
    before, after = map(float, printed.split())
    assert before > 60
    assert after < 30
