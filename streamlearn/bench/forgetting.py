"""A suite through the daemon, in this process: what it knows of each task after every stretch.

    python -m streamlearn.bench.forgetting --data ../shared/data/superni --seeds 0 1 2 --arm streamlearn --arm mh-moe

An arm is a preset, with settings to change behind colons: `streamlearn:adapter.bias=soft:learner.router_lr=0`. One JSON
object a run goes to standard output or is appended to `--out`; a run that stands there already is not made again.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import yaml

from streamlearn.adaptation import Entry
from streamlearn.assembly import Rooms
from streamlearn.bench.scores import scores
from streamlearn.bench.suite import ORDER_1, TRACE, UNSEEN, Suite, interleaved, sequential
from streamlearn.daemon import Daemon
from streamlearn.events import configure_logging
from streamlearn.learner.learner import Step
from streamlearn.serve.answers import at_once, evaluate
from streamlearn.serve.jobs import EvalJob, JobQueue
from streamlearn.serve.status import Board, Clock, Phase, Status
from streamlearn.settings import Settings
from streamlearn.snapshot.snapshot import SnapshotInfo
from streamlearn.stream.batch import Batch

NANO: dict[str, dict[str, Any]] = {
    "stream": {"max_tokens": 1024, "batch_tokens": 1024, "batch_records": 8},
    "learner": {"lr": 1e-3},
    "probe": {"warmup_tokens": 1024, "similarity_tokens": 512},
    "snapshot": {"every_records": 1_000_000, "every_s": 1e9},
    "log": {"level": "error"},
}
"""What differs from the defaults for the bundled backbone."""


class Referee:
    """Watches a run and, when the last record of a stretch is done with, examines all tasks seen so far."""

    def __init__(self, suite: Suite, rooms: Rooms, *, every_stretch: bool) -> None:
        self._suite = suite
        self._rooms = rooms
        self._every_stretch = every_stretch
        self._ends = [*suite.boundaries, sum(len(s.records) for s in suite.stretches)]
        self.matrix: list[dict[str, float]] = []
        self.losses: list[dict[str, float]] = []
        self.entries: list[Entry] = []
        self.seconds = 0.0

    def on_start(self, status: Status) -> None:
        """Nothing yet."""

    def on_shift(self, entry: Entry) -> None:
        """Note it."""
        self.entries.append(entry)

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Nothing."""

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Examine at the end of a stretch; a batch over the border counts to the later one."""
        del batch, step, status
        while len(self.matrix) < len(self._ends) - 1 and self._rooms.adaptation.records >= self._ends[len(self.matrix)]:
            self.examine()

    def examine(self) -> None:
        """Score the tasks seen so far on their test records."""
        started = time.monotonic()
        number = len(self.matrix)
        last = number == len(self._ends) - 1
        seen = [task for stretch in self._suite.stretches[: number + 1] for task in stretch.tasks]
        if not (self._every_stretch or last):
            seen = list(self._suite.stretches[number].tasks)
        accuracy, loss = {}, {}
        for task in dict.fromkeys(seen):
            job = EvalJob(self._suite.tests[task], generate=False, max_new_tokens=1)
            room = self._rooms
            work = evaluate(job, room.learner, room.decoder, room.adaptation.slots_of, row_tokens=4096)
            result = at_once(work)
            accuracy[task], loss[task] = result.token_accuracy, result.loss
        self.matrix.append(accuracy)
        self.losses.append(loss)
        self.seconds += time.monotonic() - started


def run(suite: Suite, arm: str, seed: int, *, every_stretch: bool = True) -> dict[str, Any]:
    """One run; JSON-ready figures."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stream.jsonl"
        rows = [record for stretch in suite.stretches for record in stretch.records]
        file.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
        rooms = Rooms(settings_of(arm, seed, Path(folder), file))
        referee = Referee(suite, rooms, every_stretch=every_stretch)
        started = time.monotonic()
        Daemon(rooms, Board(Status(Phase.STARTING), Clock()), JobQueue(1), observer=referee).run()
        while len(referee.matrix) < len(suite.stretches):
            referee.examine()
        seconds = time.monotonic() - started - referee.seconds
        tokens = rooms.state.tokens
        adaptation = rooms.adaptation
        cost = adaptation.probe_seconds + adaptation.forgetting.seconds
        rooms.close()
    ended = {task: number for number, stretch in enumerate(suite.stretches) for task in stretch.tasks}
    return {
        "suite": suite.name,
        "tasks": len(suite.tests),
        "records": len(rows),
        "arm": arm,
        "seed": seed,
        **asdict(scores(referee.matrix, ended)),
        "loss": sum(referee.losses[-1].values()) / len(suite.tests),
        "final": referee.matrix[-1],
        "matrix": referee.matrix,
        "boundaries": suite.boundaries,
        "shifts": [entry.to_json() for entry in referee.entries],
        "tokens_per_s": tokens / seconds,
        "probe_and_holdout_share": cost / seconds,
    }


def settings_of(arm: str, seed: int, folder: Path, file: Path) -> Settings:
    """The settings that an arm stands for."""
    preset, *changes = arm.split(":")
    sections: dict[str, Any] = {name: dict(values) for name, values in NANO.items()}
    sections.setdefault("adapter", {})["preset"] = preset
    for change in changes:
        key, value = change.split("=")
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = yaml.safe_load(value)
    return Settings(state=folder / "state", seed=seed, source={"jsonl": {"path": file}}, **sections)


def suite_of(arguments: argparse.Namespace, seed: int) -> Suite:
    """The suite that the command line names."""
    tasks = [*ORDER_1, *UNSEEN, *TRACE][: arguments.tasks]
    if arguments.order:
        tasks = arguments.order
    make = interleaved if arguments.interleaved else sequential
    return make(arguments.data, tasks, records=arguments.records, tests=arguments.tests, seed=seed)


def _done(out: Path | None) -> set[tuple[str, str, int, int]]:
    if out is None or not out.exists():
        return set()
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {(row["suite"], row["arm"], row["seed"], row["tasks"]) for row in rows}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of task files")
    parser.add_argument("--arm", action="append", required=True, help="preset:section.key=value:...")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tasks", type=int, default=8, help="how many of SuperNI's fifteen and TRACE's eight")
    parser.add_argument("--order", nargs="+", help="tasks by name instead")
    parser.add_argument("--records", type=int, default=200, help="training records of each task at most")
    parser.add_argument("--tests", type=int, default=50, help="test records of each task at most")
    parser.add_argument("--interleaved", action="store_true", help="two and three tasks at a time")
    parser.add_argument("--diagonal", action="store_true", help="examine a task at the end of its stretch alone")
    parser.add_argument("--out", type=Path, help="JSON lines, appended to")
    arguments = parser.parse_args(argv)
    configure_logging("error")
    for seed in arguments.seeds:
        suite = suite_of(arguments, seed)
        for arm in arguments.arm:
            if (suite.name, arm, seed, len(suite.tests)) in _done(arguments.out):
                continue
            result = run(suite, arm, seed, every_stretch=not arguments.diagonal)
            if arguments.out is None:
                sys.stdout.write(json.dumps(result) + "\n")
            else:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
            line = f"{arm} seed {seed}: AP {result['AP']:.3f} AF {result['AF']:.3f} BWT {result['BWT']:+.3f} "
            line += f"loss {result['loss']:.3f} shifts {len(result['shifts'])} {result['tokens_per_s']:.0f} tokens/s "
            sys.stderr.write(line + f"cost {result['probe_and_holdout_share']:.3f}\n")


if __name__ == "__main__":
    main()
