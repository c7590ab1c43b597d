"""Worker processes that make the missing ones of a list of runs, several at a time."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, ClassVar

from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmarks.learn.job import RunJob
from benchmarks.learn.worker import BUSY
from streamlearn.errors import StreamlearnError

ERROR_LINES = 30
"""Lines of a failed run's output that are kept: the end of its traceback."""
POLL_S = 0.2


class RunFailedError(StreamlearnError):
    """Runs failed; the message lists them and where their errors are."""

    exit_code: ClassVar[int] = 1

    @classmethod
    def of(cls, failed: Sequence[RunJob]) -> "RunFailedError":
        """Return the error that lists the failed runs."""
        lines = [f"  {job.title}  ({job.error})" for job in failed]
        return cls(f"{len(failed)} of the runs failed; start again to repeat them\n" + "\n".join(lines))


@dataclass(frozen=True)
class Outcome:
    """What became of the missing runs."""

    made: list[RunJob]
    failed: list[RunJob]
    busy: list[RunJob]
    """Runs that another command was making."""


@dataclass
class Worker:
    """A run in progress."""

    job: RunJob
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]
    """What the process writes to standard error; a pipe would block it when full."""
    started: float = field(default_factory=time.monotonic)

    @property
    def progress(self) -> str:
        """The worker's last progress report."""
        try:
            return self.job.running.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def last_lines(self) -> str:
        """Return the end of what the process wrote to standard error."""
        self.errors.seek(0)
        return "\n".join(self.errors.read().decode(errors="replace").splitlines()[-ERROR_LINES:])


def make_runs(jobs: Sequence[RunJob], *, side_by_side: int, console: Console) -> Outcome:
    """Make the runs that have no result yet, begun in the given order.

    A failed run does not stop the others: it is printed at once, and the end of its output is kept in `RunJob.error`.
    A run that is interrupted, or that failed, is made by the next call.
    """
    waiting = deque(job for job in jobs if not job.file.exists())
    outcome, workers = Outcome([], [], []), list[Worker]()
    total = len(waiting)
    console.print(f"{len(jobs) - total} runs found, {total} to make, {side_by_side} at a time", style="dim")
    threads = max(1, len(os.sched_getaffinity(0)) // side_by_side)  # more threads than cores slow each other down
    live = Live(console=console, refresh_per_second=1, transient=True) if console.is_terminal else None
    with _stopped_on_exit(workers, live):
        while waiting or workers:
            while waiting and len(workers) < side_by_side:
                workers.append(start(waiting.popleft(), threads))
            time.sleep(POLL_S)
            for worker in [each for each in workers if each.process.poll() is not None]:
                workers.remove(worker)
                _finish(worker, outcome, console, f"{total - len(waiting) - len(workers)} of {total}")
            if live:
                live.update(_table(workers, f"{total - len(waiting) - len(workers)} of {total} done"))
    return outcome


def start(job: RunJob, threads: int) -> Worker:
    """Start a run in a process with so many threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.learn.worker", job.to_json()]
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the run is finished
    return Worker(job, subprocess.Popen(command, env=environment, stderr=errors), errors)


@contextmanager
def _stopped_on_exit(workers: list[Worker], live: Live | None) -> Iterator[None]:
    """Stop the workers left when the block ends by an error or a signal; they would outlive this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if live:
            live.start()
        yield
    finally:
        if live:
            live.stop()
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.wait()
            worker.errors.close()
        signal.signal(signal.SIGTERM, before)


def _finish(worker: Worker, outcome: Outcome, console: Console, count: str) -> None:
    job, code = worker.job, worker.process.returncode
    seconds = f"{time.monotonic() - worker.started:.0f} s"
    if code == BUSY:
        outcome.busy.append(job)
        console.print(f"{job.title}  is being made by another command", style="dim", highlight=False)
    elif code:
        outcome.failed.append(job)
        text = f"{job.title}  failed with exit code {code} after {seconds}\n{worker.last_lines()}\n"
        job.error.parent.mkdir(parents=True, exist_ok=True)
        job.error.write_text(text, encoding="utf-8")
        console.print(text, style="red", highlight=False, markup=False)
    else:
        outcome.made.append(job)
        job.error.unlink(missing_ok=True)
        console.print(f"{job.title}  {seconds}  ({count})", highlight=False, markup=False)
    worker.errors.close()


def _table(workers: Iterable[Worker], caption: str) -> Table:
    table = Table("run", "progress", "seconds", box=None, caption=caption, caption_justify="left")
    for worker in workers:
        table.add_row(worker.job.title, worker.progress, f"{time.monotonic() - worker.started:.0f}")
    return table
