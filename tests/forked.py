"""Processes forked from one that has imported everything: importing PEFT takes longer than what a test is of.

Tests of a process's start start a real one (`tests.daemon.test_process`, `tests.systemd`). Forked processes also share
the seed of Python's hashes; `tests.end_to_end.test_exactly_once` compares them with one that does not.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__, "streamlearn.cli.run", "tests.learners"])


class RunningProcess(Protocol):
    """What tests need of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class ForkedProcess:
    """A function in a process of its own, with the interface of `subprocess.Popen`."""

    def __init__(
        self, target: Callable[..., object], *args: Any, stderr: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Begin `target(*args)`; `stderr` is appended to, `env` is added to the environment."""
        stderr.touch()
        # `daemon`: killed when the test run ends, whatever happened to it.
        self._process = _CONTEXT.Process(target=_run, args=(target, args, stderr, dict(env or {})), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, -N for signal N; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def run_command(arguments: list[str]) -> None:
    """`streamlearn ARGUMENTS`, as its program would do it."""
    from streamlearn.cli.main import main  # noqa: PLC0415 - a process that only starts others needs none of it

    sys.argv = ["streamlearn", *arguments]
    main()


def _run(target: Callable[..., object], args: tuple[Any, ...], stderr: Path, env: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    with Path(os.devnull).open("r+b") as nothing, stderr.open("ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
        os.dup2(log.fileno(), 2)
    target(*args)
