"""SIGTERM before, while and after the rooms are opened."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamlearn.runtime.signals import StopEarly, StopSignals

START_S = 120.0


def test_while_rooms_are_opened_a_signal_is_no_error() -> None:
    """Nothing that catches Exception on the way may take it for a failure of its own."""
    signals = StopSignals()
    before = signal.getsignal(signal.SIGTERM)
    with signals.installed():
        signals.opening()
        with pytest.raises(StopEarly, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before
    assert not issubclass(StopEarly, Exception)


def test_a_loop_is_asked_by_name() -> None:
    signals, asked = StopSignals(), list[str]()
    with signals.installed():
        signals.opening()
        signals.ask(asked.append)
        os.kill(os.getpid(), signal.SIGINT)
    assert asked == ["SIGINT"]


def test_while_modules_are_imported_a_signal_ends_the_process_cleanly(tmp_path: Path) -> None:
    """`run` listens before it imports what takes seconds."""
    script = (
        "import os, signal, sys, importlib.abc\n"
        "class Telling(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'streamlearn.commands.run': os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Telling())\n"
        f"sys.argv = ['streamlearn', 'run', '--config', {str(tmp_path / 'absent.yaml')!r}]\n"
        "from streamlearn.commands.cli import main; main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=START_S)
    assert ended.returncode == 0, ended.stderr
