"""Which runs are wanted, which are there, and the making of the others, side by side."""

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

from streamlearn.bench.learn.methods import ABLATIONS, METHODS
from streamlearn.bench.learn.one import BUSY, Job
from streamlearn.bench.learn.suites import SUITES
from streamlearn.errors import StreamlearnError, UsageError

FIRST = ("streamlearn", "lora", "joint", "cp-moe", "mh-moe", "loramoe")
"""Methods of which all seeds are made before any other."""


class RunFailedError(StreamlearnError):
    """A run ended with an error; its last lines are in the message."""


@dataclass(frozen=True)
class Plan:
    """What `bench learn` was asked for."""

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
        """Refuse what cannot be run.

        Raises:
            UsageError: names what is unknown, and what is known.
        """
        for method in self.methods:
            if method not in METHODS and method not in ABLATIONS:
                raise UsageError(f"--method {method}: unknown, known are {', '.join([*METHODS, *ABLATIONS])}")
        for suite in self.suites:
            if suite not in SUITES and not Path(suite).is_dir():
                raise UsageError(f"--suite {suite}: neither a folder nor one of {', '.join(SUITES)}")
        if self.order and any(suite in SUITES for suite in self.suites):
            raise UsageError("--order: is for a folder of your own; the named suites have theirs")

    def jobs(self) -> list[Job]:
        """Every run, in the order in which they are made."""
        first = [method for method in self.methods if method in FIRST]
        rest = [method for method in self.methods if method not in FIRST]
        return [
            Job(
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
    job: Job
    process: "subprocess.Popen[str]"
    started: float = field(default_factory=time.monotonic)

    @property
    def said(self) -> str:
        """How far it says that it is."""
        try:
            return self.job.running.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


def carry_out(plan: Plan, *, side_by_side: int, console: Console) -> int:
    """Make the runs that are missing and return how many were made; stopped in the middle, they are made next time.

    Raises:
        UsageError: see `Plan.check`.
        RunFailedError: a run failed; the others that were under way are stopped.
    """
    plan.check()
    waiting = deque(job for job in plan.jobs() if not job.file.exists())
    total, made = len(waiting), 0
    console.print(f"{len(plan.jobs()) - total} runs are there, {total} to make, {side_by_side} at a time", style="dim")
    workers: list[_Worker] = []
    threads = max(1, len(os.sched_getaffinity(0)) // side_by_side)  # more than there are cores slow each other down
    live = Live(console=console, refresh_per_second=1, transient=True) if console.is_terminal else None
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or the workers would live on
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


def _start(job: Job, threads: int) -> _Worker:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "streamlearn.bench.learn.one", job.to_json()]
    return _Worker(job, subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))  # noqa: S603


def _finish(worker: _Worker, console: Console, count: str) -> bool:
    job, (_, errors) = worker.job, worker.process.communicate()
    name = f"{job.suite_name}  {job.method}  seed {job.seed}"
    code = worker.process.returncode
    if code == BUSY:
        console.print(f"{name}  is made by another command", style="dim", highlight=False)
        return False
    if code:
        raise RunFailedError(f"{name} failed with exit code {code}:\n" + "\n".join(errors.splitlines()[-12:]))
    console.print(f"{name}  {time.monotonic() - worker.started:.0f} s  ({count})", highlight=False)
    return True


def _table(workers: Iterable[_Worker], caption: str) -> Table:
    table = Table("suite", "method", "seed", "", "seconds", box=None, caption=caption, caption_justify="left")
    for worker in workers:
        job = worker.job
        elapsed = f"{time.monotonic() - worker.started:.0f}"
        table.add_row(job.suite_name, job.method, f"{job.seed}", worker.said, elapsed)
    return table
