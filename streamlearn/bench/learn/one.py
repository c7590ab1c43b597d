"""One run in a process of its own: its memory is its own, and a crash takes nothing else along.

    python -m streamlearn.bench.learn.one '{"suite": "superni-1", "method": "lora", "seed": 0, ...}'

The fields are those of `Job`. While it runs it holds a lock on `FILE.running`, which says how far it is; two commands
on one folder therefore never make the same run twice, and one that died leaves nothing that blocks the next.
"""

import fcntl
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from streamlearn.bench.learn.methods import ABLATIONS, METHODS
from streamlearn.bench.learn.run import run
from streamlearn.bench.learn.suites import SUITES, Draw, Suite, of_folder
from streamlearn.events import configure_logging

BUSY = 3
"""Exit code: another process makes this very run."""


@dataclass(frozen=True)
class Job:
    """What to run and where to put the result."""

    suite: str
    """A name, or a folder of task files."""
    method: str
    seed: int
    folders: tuple[str, ...]
    records: int
    tests: int
    out: str
    order: tuple[str, ...] = ()
    generate: bool = True

    @property
    def suite_name(self) -> str:
        """As files and tables call it."""
        return self.suite if self.suite in SUITES else Path(self.suite).resolve().name

    @property
    def file(self) -> Path:
        """The result."""
        method = self.method.replace(" ", "-").replace(",", "")
        return Path(self.out) / self.suite_name / f"{method}.{self.seed}.json"

    @property
    def running(self) -> Path:
        """What is locked meanwhile."""
        return self.file.with_suffix(".running")

    def to_json(self) -> str:
        """The command line's argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Its inverse."""
        values: dict[str, Any] = json.loads(text)
        rows: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**rows)

    def make_suite(self) -> Suite:
        """The stream."""
        draw = Draw([Path(folder) for folder in self.folders], self.records, self.tests, self.seed)
        if self.suite in SUITES:
            return SUITES[self.suite](draw)
        return of_folder(Path(self.suite), draw, self.order)


def main() -> None:
    """Make the run unless it is there or under way."""
    job = Job.from_json(sys.argv[1])
    configure_logging("error")
    job.file.parent.mkdir(parents=True, exist_ok=True)
    with job.running.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(BUSY)
        if job.file.exists():
            return

        def progress(text: str) -> None:
            lock.truncate(0)
            lock.write(text)
            lock.flush()

        methods = {**METHODS, **ABLATIONS}
        progress("loading")
        result = run(job.make_suite(), job.method, methods[job.method], job.seed, job.generate, progress)
        written = job.file.with_suffix(".tmp")
        written.write_bytes(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
        os.replace(written, job.file)
        job.running.unlink()


if __name__ == "__main__":
    main()
