"""Prometheus' own checker, where there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest


def promtool(*arguments: str | Path, stdin: str | None = None) -> str:
    """Run promtool, which must succeed, and return what it says; skip the test without it."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on PATH: install prometheus")
    done = subprocess.run([program, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said
