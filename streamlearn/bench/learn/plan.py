"""The runs that `bench learn` needs, and the worker processes that make the missing ones."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from streamlearn.bench.learn.job import RunJob
from streamlearn.bench.learn.methods import ABLATIONS, METHODS
from streamlearn.bench.learn.suites import SUITES
from streamlearn.bench.learn.worker import BUSY
from streamlearn.errors import StreamlearnError, UsageError

FIRST = ("streamlearn", "lora", "joint", "cp-moe", "mh-moe", "loramoe")
"""Methods that are run for all seeds before any other method."""


class RunFailedError(StreamlearnError):
    """A run ended with an error; the message holds the last lines of its output."""


@dataclass(frozen=True)
class Plan:
    """The runs that a `bench learn` command asks for."""

    suites: Sequence[str]
    methods: Sequence[str]
    seeds: Sequence[int]
    data: Sequence[Path]
    out: Path
    records: int = 200
    tests: int = 50
    order: Sequence[str] = ()
    generate: bool = True

    def check(self) -> None:
        """Check that every suite and method can be run.

        Raises:
            UsageError: a suite, method or order is unknown; the message lists the known ones.
        """
        for method in self.methods:
            if method not in METHODS and method not in ABLATIONS:
                raise UsageError(f"--method {method}: unknown; expected one of {', '.join([*METHODS, *ABLATIONS])}")
        for suite in self.suites:
            if suite not in SUITES and not Path(suite).is_dir():
                raise UsageError(f"--suite {suite}: expected a folder or one of {', '.join(SUITES)}")
        if self.order and any(suite in SUITES for suite in self.suites):
            raise UsageError("--order: applies to a folder of task files; a named suite has its own order")

    def jobs(self) -> list[RunJob]:
        """Return every run, in the order in which they are made."""
        first = [method for method in self.methods if method in FIRST]
        rest = [method for method in self.methods if method not in FIRST]
        return [
            RunJob(
                suite=suite if suite in SUITES else str(Path(suite).resolve()),
                method=method,
                seed=seed,
                folders=tuple(str(folder.resolve()) for folder in self.data),
                records=self.records,
                tests=self.tests,
                out=str(self.out.resolve()),
                order=tuple(self.order),
                generate=self.generate,
            )
            for group in (first, rest)
            for suite in self.suites
            for seed in self.seeds
            for method in group
        ]


@dataclass
class _Worker:
    job: RunJob
    process: "subprocess.Popen[str]"
    started: float = field(default_factory=time.monotonic)

    @property
    def progress(self) -> str:
        """The worker's last progress report."""
        try:
            return self.job.running.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


def carry_out(plan: Plan, *, side_by_side: int, console: Console) -> int:
    """Make the missing runs and return how many were made; a run that is interrupted is made by the next call.

    Raises:
        UsageError: see `Plan.check`.
        RunFailedError: a run failed; the other runs in progress are stopped.
    """
    plan.check()
    waiting = deque(job for job in plan.jobs() if not job.file.exists())
    total, made = len(waiting), 0
    console.print(f"{len(plan.jobs()) - total} runs found, {total} to make, {side_by_side} at a time", style="dim")
    workers: list[_Worker] = []
    threads = max(1, len(os.sched_getaffinity(0)) // side_by_side)  # more threads than cores slow each other down
    live = Live(console=console, refresh_per_second=1, transient=True) if console.is_terminal else None
    before = signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # else the workers outlive this process
    try:
        if live:
            live.start()
        while waiting or workers:
            while waiting and len(workers) < side_by_side:
                workers.append(_start(waiting.popleft(), threads))
            time.sleep(0.5)
            for worker in [each for each in workers if each.process.poll() is not None]:
                workers.remove(worker)
                made += _finish(worker, console, f"{total - len(waiting) - len(workers)} of {total}")
            if live:
                live.update(_table(workers, f"{total - len(waiting) - len(workers)} of {total} done"))
    finally:
        if live:
            live.stop()
        for worker in workers:
            worker.process.terminate()
            worker.process.communicate()
        signal.signal(signal.SIGTERM, before)
    return made


def _start(job: RunJob, threads: int) -> _Worker:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "streamlearn.bench.learn.worker", job.to_json()]
    return _Worker(job, subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))  # noqa: S603


def _finish(worker: _Worker, console: Console, count: str) -> bool:
    job, (_, errors) = worker.job, worker.process.communicate()
    name = f"{job.suite_name}  {job.method}  seed {job.seed}"
    code = worker.process.returncode
    if code == BUSY:
        console.print(f"{name}  is being made by another command", style="dim", highlight=False)
        return False
    if code:
        raise RunFailedError(f"{name} failed with exit code {code}:\n" + "\n".join(errors.splitlines()[-12:]))
    console.print(f"{name}  {time.monotonic() - worker.started:.0f} s  ({count})", highlight=False)
    return True


def _table(workers: Iterable[_Worker], caption: str) -> Table:
    table = Table("suite", "method", "seed", "progress", "seconds", box=None, caption=caption, caption_justify="left")
    for worker in workers:
        job = worker.job
        elapsed = f"{time.monotonic() - worker.started:.0f}"
        table.add_row(job.suite_name, job.method, f"{job.seed}", worker.progress, elapsed)
    return table
