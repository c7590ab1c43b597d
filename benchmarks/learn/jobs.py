"""The runs of one command: which, in what order, and each in its own process, several at a time.

A plan's file is a YAML list; what stands first is made first. A run that a later part names again is made once.

    - suites: [superni-1]
      methods: [streamlearn, lora]      # all methods if absent
      seeds: [0, 1, 2]

Each run has its own process, so its memory is its own and a crash affects no other run. While it is in progress the
process holds a lock on `FILE.running` and writes its progress there. Two commands on one folder therefore never make
the same run twice, and a process that was killed does not block the next one.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

import orjson
import yaml

from benchmarks.learn.methods import ABLATIONS, METHODS, read_profile
from benchmarks.learn.run import run_method
from benchmarks.learn.suites import SUITES, Draw, Split, Suite, make_suite
from streamlearn.errors import StreamlearnError, UsageError
from streamlearn.events import configure_logging

BUSY = 3
"""Exit code when another process is making the same run."""
ERROR_LINES = 30
"""Lines of a failed run's output that are kept: the end of its traceback."""
POLL_S = 0.2

Tell = Callable[[str], None]
"""Receives a line for people."""


class RunFailedError(StreamlearnError):
    """Runs failed; the message lists them and where their errors are."""

    exit_code: ClassVar[int] = 1

    @classmethod
    def from_jobs(cls, failed: Sequence["RunJob"]) -> "RunFailedError":
        lines = [f"  {job.title}  ({job.error})" for job in failed]
        return cls(f"{len(failed)} of the runs failed; start again to repeat them\n" + "\n".join(lines))


@dataclass(frozen=True)
class RunConditions:
    """What the runs of one command have in common."""

    data: tuple[str, ...]
    """Folders of task files that named suites draw from."""
    out: str
    profile: str = "nano"
    """A packaged profile's name, or a profile's file."""
    backbone: str | None = None
    """Folder of the backbone; None for the profile's."""
    split: Split = "test"
    """The records that are scored."""
    records: int | None = None
    """Maximum training records per task; None for the profile's."""
    evaluated: int = 50
    """Maximum scored records per task."""
    order: tuple[str, ...] = ()
    """Tasks of a folder, in training order; empty for the order of their names."""

    def check(self, suites: Sequence[str], methods: Sequence[str], known: Sequence[str]) -> None:
        """Check that every suite and method can be run.

        Raises:
            UsageError: a suite, method or order is unknown, the message lists the known ones; or there is no backbone.
        """
        read_profile(self.profile).model(Path(self.backbone) if self.backbone else None)
        for name in methods:
            if name not in known:
                raise UsageError(f"--method {name}: unknown; expected one of {', '.join(known)}")
        for suite in suites:
            if suite not in SUITES and not Path(suite).is_dir():
                raise UsageError(f"--suite {suite}: expected a folder or one of {', '.join(SUITES)}")
            if suite in SUITES and not self.data:
                raise UsageError(f"--suite {suite}: needs the folders of its task files; pass them with --data")
        if self.order and any(suite in SUITES for suite in suites):
            raise UsageError("--order: applies to a folder of task files; a named suite has its own order")


@dataclass(frozen=True)
class RunJob:
    """One run of one method on one suite with one seed."""

    suite: str
    """A suite's name, or a folder of task files."""
    method: str
    seed: int
    conditions: RunConditions
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Changes of this run only, by dotted key: the values that a trial of a search tries."""
    label: str = ""
    """Folder of a trial under `out`; empty for a run that is no trial."""
    only_at_end: bool = False
    """Whether the run is scored at the end of the stream only."""

    @property
    def suite_name(self) -> str:
        """The suite's name in files and tables."""
        return self.suite if self.suite in SUITES else Path(self.suite).resolve().name

    @property
    def title(self) -> str:
        """Suite, method, seed and label, for people."""
        return "  ".join(filter(None, (self.suite_name, self.method, f"seed {self.seed}", self.label)))

    @property
    def file(self) -> Path:
        """The result file."""
        method = self.method.replace(" ", "-").replace(",", "")
        return Path(self.conditions.out) / self.label / self.suite_name / f"{method}.{self.seed}.json"

    @property
    def running(self) -> Path:
        """The file that is locked while the run is in progress."""
        return self.file.with_suffix(".running")

    @property
    def error(self) -> Path:
        """The file with the end of a failed run's output."""
        return self.file.with_suffix(".error")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RunJob":
        values: dict[str, Any] = json.loads(text)
        given = values.pop("conditions")
        conditions = RunConditions(**{**given, "data": tuple(given["data"]), "order": tuple(given["order"])})
        return cls(conditions=conditions, **values)

    @property
    def records(self) -> int:
        """Maximum training records per task."""
        return self.conditions.records or read_profile(self.conditions.profile).records

    def make_suite(self) -> Suite:
        """Build the suite with this run's records."""
        given = self.conditions
        prompts = read_profile(given.profile).prompts
        draw = Draw(list(map(Path, given.data)), self.records, given.evaluated, self.seed, given.split, prompts)
        suite = make_suite(self.suite, draw, given.order)
        return suite.scored_at_end() if self.only_at_end else suite


@dataclass(frozen=True)
class Part:
    """All of some methods on all of some suites with all of some seeds."""

    suites: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]


def read_plan(file: Path) -> list[Part]:
    """Read a plan's file.

    Raises:
        UsageError: it is not a plan; the message has the number of the part.
    """
    try:
        parts = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--plan {file}: expected a YAML file: {error}") from error
    if not isinstance(parts, list) or not parts:
        raise UsageError(f"--plan {file}: expected a list of parts, found {type(parts).__name__}")
    return [_part(values, f"--plan {file}: part {number}") for number, values in enumerate(parts, 1)]


def _part(values: Any, where: str) -> Part:
    if not isinstance(values, dict) or set(values) - {"suites", "methods", "seeds"}:
        raise UsageError(f"{where}: expected suites, methods and seeds, found {values!r}")
    values = {"methods": list(METHODS), **values}
    for key, kind in (("suites", str), ("methods", str), ("seeds", int)):
        items = values.get(key)
        if not isinstance(items, list) or not items or not all(type(item) is kind for item in items):
            raise UsageError(f"{where}: {key} must be a list of {kind.__name__}, found {items!r}")
    return Part(tuple(values["suites"]), tuple(values["methods"]), tuple(values["seeds"]))


def jobs_of(parts: Sequence[Part], conditions: RunConditions) -> list[RunJob]:
    """Return every run once, in the order in which they are made: within a part by suite, seed and method.

    Raises:
        UsageError: see `RunConditions.check`.
    """
    for part in parts:
        conditions.check(part.suites, part.methods, [*METHODS, *ABLATIONS])
    jobs = (
        RunJob(suite, method, seed, conditions)
        for part in parts
        for suite in part.suites
        for seed in part.seeds
        for method in part.methods
    )
    return list({job.file: job for job in jobs}.values())


@dataclass
class Worker:
    """A run in progress."""

    job: RunJob
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]
    """What the process writes to standard error; a pipe would block it when full."""
    started: float = field(default_factory=time.monotonic)


def make_runs(jobs: Sequence[RunJob], *, side_by_side: int, tell: Tell = print) -> list[RunJob]:
    """Make the runs that have no result yet, begun in the given order; return those that failed.

    A failed run does not stop the others: the end of its output is told and kept in `RunJob.error`. A run that is
    interrupted, that failed, or that another command is making, is left to the next call.
    """
    waiting = deque(job for job in jobs if not job.file.exists())
    failed: list[RunJob] = []
    workers: list[Worker] = []
    total = len(waiting)
    tell(f"{len(jobs) - total} runs found, {total} to make, {side_by_side} at a time")
    threads = max(1, len(os.sched_getaffinity(0)) // side_by_side)  # more threads than cores slow each other down
    with _stopped_on_exit(workers):
        while waiting or workers:
            while waiting and len(workers) < side_by_side:
                workers.append(start(waiting.popleft(), threads))
            time.sleep(POLL_S)
            for worker in [one for one in workers if one.process.poll() is not None]:
                workers.remove(worker)
                if not _finish(worker, tell, f"{total - len(waiting) - len(workers)} of {total}"):
                    failed.append(worker.job)
    return failed


def start(job: RunJob, threads: int) -> Worker:
    """Start a run in a process with so many threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the run is finished
    command = [sys.executable, "-m", "benchmarks.learn.jobs", job.to_json()]
    return Worker(job, subprocess.Popen(command, env=environment, stderr=errors), errors)


@contextmanager
def _stopped_on_exit(workers: list[Worker]) -> Iterator[None]:
    """Stop the workers left when the block ends by an error or a signal; they would outlive this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.wait()
            worker.errors.close()
        signal.signal(signal.SIGTERM, before)


def _finish(worker: Worker, tell: Tell, count: str) -> bool:
    """Tell what became of a run; whether it did not fail."""
    job, code = worker.job, worker.process.returncode
    seconds = f"{time.monotonic() - worker.started:.0f} s"
    with worker.errors as errors:
        errors.seek(0)
        last_lines = "\n".join(errors.read().decode(errors="replace").splitlines()[-ERROR_LINES:])
    if code not in (0, BUSY):
        text = f"{job.title}  failed with exit code {code} after {seconds}\n{last_lines}\n"
        job.error.parent.mkdir(parents=True, exist_ok=True)
        job.error.write_text(text, encoding="utf-8")
        tell(text)
        return False
    if code == 0:
        job.error.unlink(missing_ok=True)
    tell(f"{job.title}  is being made by another command" if code else f"{job.title}  {seconds}  ({count})")
    return True


def make_run(job: RunJob) -> int:
    """Make the run in this process, unless its result exists or another process is making it; return the exit code."""
    job.file.parent.mkdir(parents=True, exist_ok=True)
    with job.running.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return BUSY
        if job.file.exists():
            return 0

        def progress(text: str) -> None:
            lock.truncate(0)
            lock.write(text)
            lock.flush()

        progress("loading")
        result = run_method(
            job.make_suite(),
            job.method,
            {**METHODS, **ABLATIONS}[job.method],
            job.seed,
            profile=read_profile(job.conditions.profile),
            backbone_folder=Path(job.conditions.backbone) if job.conditions.backbone else None,
            own=job.own,
            progress=progress,
        )
        partial = job.file.with_suffix(".tmp")
        partial.write_bytes(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
        os.replace(partial, job.file)
        job.running.unlink()
    return 0


if __name__ == "__main__":
    configure_logging("error")
    sys.exit(make_run(RunJob.from_json(sys.argv[1])))
