"""A run in its own process: its memory is measured on its own, and a crash affects no other run.

    python -m streamlearn.bench.learn.worker '{"suite": "superni-1", "method": "lora", "seed": 0, ...}'

The fields are those of `RunJob`. While the run is in progress the worker holds a lock on `FILE.running` and writes its
progress there. Two commands on one folder therefore never make the same run twice, and a worker that was killed does
not block the next one.
"""

import fcntl
import os
import sys
from pathlib import Path

import orjson

from benchmarks.learn.job import RunJob
from benchmarks.learn.methods import ABLATIONS, METHODS
from benchmarks.learn.profile import read_profile
from benchmarks.learn.single_run import run_method
from streamlearn.events import configure_logging

BUSY = 3
"""Exit code when another process is making the same run."""


def main() -> None:
    """Make the run unless its result exists or another process is making it."""
    job = RunJob.from_json(sys.argv[1])
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

        method = {**METHODS, **ABLATIONS}[job.method]
        progress("loading")
        result = run_method(
            job.make_suite(),
            job.method,
            method,
            job.seed,
            profile=read_profile(job.profile),
            backbone_folder=Path(job.backbone) if job.backbone else None,
            own=job.own,
            progress=progress,
        )
        partial = job.file.with_suffix(".tmp")
        partial.write_bytes(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
        os.replace(partial, job.file)
        job.running.unlink()


if __name__ == "__main__":
    main()
