"""Runs of the daemon that are ended again and again until the stream is learned, compared with an undisturbed one.

The moment of each end is random: during a start, some milliseconds into learning, or while a snapshot is being
written. `kill` uses SIGKILL, and sometimes suspends the process for some seconds, as on a suspended machine;
`stop` uses SIGTERM. The next process continues from the state folder. In the end every tensor of
adapter, optimizer, detector and regimes must be bit-equal to the undisturbed run, each record must be trained or
dead-lettered once, and each dead letter must be written once.
"""

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson
import torch

from tests.broker import Broker, FileTopics
from tests.crash.figures import percentile
from tests.crash.stops import Stops, not_covered
from tests.end_to_end.process import DaemonProcess, configuration
from tests.learners import differences

PER_BATCH, PER_TASK, TAIL = 8, 200, 16
TASKS = ("what is the colour of the fox", "say hello to the small world", "the quick brown dog jumps over")
UNUSABLE = (b"not json", b"", b'{"text": 5}', b'{"prompt": "no completion"}')
GOOD, BAD = PER_TASK * len(TASKS), 12
STEPS = GOOD // PER_BATCH
STARTING, LEARNING, SAVING, PAUSED = "starting", "learning", "saving", "paused"
LAST_STEPS = 3
"""Steps at the end in which no process is ended: from outside it is not visible whether the last one was trained."""
START_S, LEARN_S = 6.0, 1.5
"""Maximum time into a start, and into learning, at which a process is ended."""
PAUSE_S = 3.0
MAX_RUN_S = 300.0


def records(seed: int) -> list[bytes]:
    """Three tasks one after another with unusable records among them, and a tail that is never batched."""
    rng = random.Random(seed)
    rows = [{"prompt": f"{task} {rng.randrange(50)}?", "completion": f" {i % 7}"} for task in TASKS for i in range(200)]
    values = [orjson.dumps(row) for row in rows]
    for number in range(BAD):
        values.insert(rng.randrange(len(values)), UNUSABLE[number % len(UNUSABLE)])
    return values + [orjson.dumps(rows[-1])] * TAIL


@dataclass
class Tally:
    """Counts and faults."""

    kills: Counter[str] = field(default_factory=Counter)
    pauses: int = 0
    stops: Stops = field(default_factory=Stops)
    runs: int = 0
    unequal_tensors: list[str] = field(default_factory=list)
    wrong_ledgers: list[str] = field(default_factory=list)
    repeated_dead_letters: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    """Times from the start of a process after a kill to its first new step."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        if self.stops.by_moment:
            return {**self.stops.to_json(), **self._comparison()}
        recoveries_s = sorted(self.recoveries_s)
        return {
            "kills": self.kills.total(),
            "kills_by_moment": dict(self.kills),
            "pauses": self.pauses,
            **self._comparison(),
            "recoveries": len(recoveries_s),
            "recovery_p50_s": round(statistics.median(recoveries_s), 2) if recoveries_s else None,
            "recovery_p99_s": round(percentile(recoveries_s, 99), 2) if recoveries_s else None,
        }

    def _comparison(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "unequal_tensors": self.unequal_tensors,
            "wrong_ledgers": self.wrong_ledgers,
            "repeated_dead_letters": self.repeated_dead_letters,
        }

    @property
    def same(self) -> bool:
        """Whether nothing was lost, repeated or changed."""
        return not (self.unequal_tensors or self.wrong_ledgers or self.repeated_dead_letters)

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, repeated or changed, and every stop was clean and in time."""
        return self.same and self.stops.clean


class End(Protocol):
    """A way to end a process at its random moment."""

    def __call__(self, daemon: DaemonProcess, moment: str, *, learning: bool) -> None:
        """End the process, wait for it, and count it; `learning` is whether it had taken a step."""


class Harness:
    """One broker, one undisturbed run, and any number of runs that are ended."""

    def __init__(
        self,
        broker: Broker | FileTopics,
        backbone: Path,
        folder: Path,
        seed: int,
        *,
        process: Callable[[Path, dict[str, Any]], DaemonProcess] = DaemonProcess,
    ) -> None:
        """`process` makes the daemon from a folder and its configuration."""
        self._process = process
        self._broker, self._backbone, self._folder = broker, backbone, folder
        self._random = random.Random(seed)
        self._records = records(seed)
        self.tally = Tally()
        self._undisturbed = self._learn("undisturbed", ends=0, end=self._kill)

    def kill(self, number: int) -> Tally:
        """Run and kill daemons until `number` kills have happened."""
        return self._repeat("killed", self._kill, lambda: number - self.tally.kills.total())

    def stop(self, number: int) -> Tally:
        """Run and stop daemons until `number` stops have happened."""
        return self._repeat("stopped", self._stop, lambda: number - self.tally.stops.by_moment.total())

    def _repeat(self, kind: str, end: End, left: Callable[[], int]) -> Tally:
        while left() > 0:
            name = f"{kind}-{self.tally.runs}"
            final = self._learn(name, ends=left(), end=end)
            self.tally.runs += 1
            self.tally.unequal_tensors += [f"{name}: {tensor}" for tensor in differences(final, self._undisturbed)]
        return self.tally

    def _kill(self, daemon: DaemonProcess, moment: str, *, learning: bool) -> None:
        del learning
        daemon.kill()
        self.tally.kills[moment] += 1

    def _stop(self, daemon: DaemonProcess, moment: str, *, learning: bool) -> None:
        self.tally.stops.stop(daemon, moment, learning=learning)

    def _learn(self, name: str, ends: int, end: End) -> dict[str, torch.Tensor]:
        topic, dead = self._broker.new_topic(), self._broker.new_topic()
        self._broker.produce(topic, self._records)
        config = configuration(self._broker, topic, dead, self._backbone, PER_BATCH)
        config["snapshot"] = {"every_records": 80}
        config["probe"] = {"warmup_tokens": 256, "similarity_tokens": 128}
        daemon = self._process(self._folder / name, config)
        try:
            ended = False
            while daemon.journalled_step() < STEPS:
                ended = self._run_once(daemon, end if ends > 0 else None, after_another=ended)
                ends -= ended
            if daemon.is_running:
                code = daemon.terminate()
                assert code == 0, f"{name}: exit code {code}"
            uncovered = not_covered(daemon)
            assert uncovered is None, f"{name}: ended between its last journal line and that step: {uncovered}"
        finally:
            daemon.end()
        self._audit(name, daemon, dead)
        return daemon.newest().tensors()

    def _run_once(self, daemon: DaemonProcess, end: End | None, *, after_another: bool) -> bool:
        """Run one process to the end of the stream or to its random end; return whether it was ended."""
        before, started, learned_at = daemon.journalled_step(), time.monotonic(), None
        moment, delay = self._draw(end)
        daemon.start()
        while (step := daemon.journalled_step()) < STEPS:
            now = time.monotonic()
            assert now - started < MAX_RUN_S, daemon.log.read_text()[-3000:]
            if learned_at is None and step > before:
                learned_at = now
                if after_another:
                    self.tally.recoveries_s.append(now - started)
            learning = learned_at is not None
            due = {
                STARTING: now - started >= delay,
                LEARNING: learned_at is not None and now - learned_at >= delay,
                PAUSED: learned_at is not None and now - learned_at >= delay,
                SAVING: learning and any((daemon.state / "snapshots").glob(".staging-*")),
            }
            if moment == PAUSED and due[moment]:
                daemon.pause(PAUSE_S)
                self.tally.pauses += 1
                moment = None
            elif moment is not None and end is not None and due[moment] and step < STEPS - LAST_STEPS:
                end(daemon, moment, learning=learning)
                return True
            assert daemon.is_running, daemon.log.read_text()[-3000:]
            time.sleep(0.002)
        return False

    def _draw(self, end: End | None) -> tuple[str | None, float]:
        """Return the moment at which a process is ended, and the delay in seconds."""
        if end is None:
            return None, 0.0
        weights = (2, 5, 3, 1 if end == self._kill else 0)
        moment = self._random.choices((STARTING, LEARNING, SAVING, PAUSED), weights)[0]
        return moment, self._random.uniform(0, START_S if moment == STARTING else LEARN_S)

    def _audit(self, name: str, daemon: DaemonProcess, dead: str) -> None:
        ledger = daemon.newest().ledger()
        if ledger != {0: (GOOD, BAD, GOOD + BAD)}:
            self.tally.wrong_ledgers.append(f"{name}: {ledger}")
        headers = [dict(message.headers) for message in self._broker.read_all(dead)]
        offsets = Counter(header["__streamlearn.errors.offset"] for header in headers)
        self.tally.repeated_dead_letters += sum(count - 1 for count in offsets.values())
        if len(offsets) != BAD:
            self.tally.wrong_ledgers.append(f"{name}: {len(offsets)} dead letters, {BAD} unusable records")
