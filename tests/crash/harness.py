"""Runs of the daemon that are ended again and again until the stream is learned, against one that never is.

The moment is drawn from the seed: somewhere in a start, some milliseconds into learning, or while a snapshot is being
written. `kill` ends a life with kill -9 and now and then lets one stand still for some seconds as a suspended machine
does; `stop` ends it with SIGTERM. The next life goes on from what the state folder holds. In the end every tensor of
adapter, optimizer, detector and regimes must be bit-equal to the run that was left alone, each record trained or set
aside once, and each dead letter written once.
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

from tests.broker import Broker
from tests.crash.figures import percentile
from tests.crash.stops import Stops, not_covered
from tests.end_to_end.process import DaemonProcess, configuration

PER_BATCH, PER_TASK, TAIL = 8, 200, 16
TASKS = ("what is the colour of the fox", "say hello to the small world", "the quick brown dog jumps over")
RUBBISH = (b"not json", b"", b'{"text": 5}', b'{"prompt": "no completion"}')
GOOD, BAD = PER_TASK * len(TASKS), 12
STEPS = GOOD // PER_BATCH
STARTING, LEARNING, SAVING, PAUSED = "starting", "learning", "saving", "paused"
TOO_LATE = 3
"""Steps before the last in which nothing is ended: from outside nobody sees whether the last one was trained."""
START_S, LEARN_S = 6.0, 1.5
"""Longest time into a start, and into learning, at which it is ended."""
PAUSE_S = 3.0
MAX_LIFE_S = 300.0


def records(seed: int) -> list[bytes]:
    """Three tasks one after the other, unusable records strewn in, and a tail that is held back."""
    rng = random.Random(seed)
    rows = [{"prompt": f"{task} {rng.randrange(50)}?", "completion": f" {i % 7}"} for task in TASKS for i in range(200)]
    values = [orjson.dumps(row) for row in rows]
    for number in range(BAD):
        values.insert(rng.randrange(len(values)), RUBBISH[number % len(RUBBISH)])
    return values + [orjson.dumps(rows[-1])] * TAIL


@dataclass
class Tally:
    """What came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    pauses: int = 0
    stops: Stops = field(default_factory=Stops)
    runs: int = 0
    unequal_tensors: list[str] = field(default_factory=list)
    wrong_ledgers: list[str] = field(default_factory=list)
    repeated_letters: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    """From the start of a process after a kill to its first new step."""

    def to_json(self) -> dict[str, Any]:
        """Figures."""
        if self.stops.by_moment:
            return {**self.stops.to_json(), **self._sameness()}
        taken = sorted(self.recoveries_s)
        return {
            "kills": self.kills.total(),
            "kills_by_moment": dict(self.kills),
            "pauses": self.pauses,
            **self._sameness(),
            "recoveries": len(taken),
            "recovery_p50_s": round(statistics.median(taken), 2) if taken else None,
            "recovery_p99_s": round(percentile(taken, 99), 2) if taken else None,
        }

    def _sameness(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "unequal_tensors": self.unequal_tensors,
            "wrong_ledgers": self.wrong_ledgers,
            "repeated_dead_letters": self.repeated_letters,
        }

    @property
    def same(self) -> bool:
        """Whether nothing was lost, repeated or changed."""
        return not (self.unequal_tensors or self.wrong_ledgers or self.repeated_letters)

    @property
    def clean(self) -> bool:
        """Whether besides every stop was an orderly one, soon enough."""
        return self.same and self.stops.clean


class End(Protocol):
    """How a life is ended at the moment that was drawn for it."""

    def __call__(self, daemon: DaemonProcess, moment: str, *, learning: bool) -> None:
        """End it, wait for it, and count it; `learning`: whether it had taken a step."""


class Harness:
    """One broker, one reference run, any number of ended ones."""

    def __init__(self, broker: Broker, backbone: Path, folder: Path, seed: int) -> None:
        self._broker, self._backbone, self._folder = broker, backbone, folder
        self._random = random.Random(seed)
        self._records = records(seed)
        self.tally = Tally()
        self._whole = self._learn("whole", ends=0, end=self._kill)

    def kill(self, number: int) -> Tally:
        """Make killed runs until `number` kills have happened."""
        return self._repeat("killed", self._kill, lambda: number - self.tally.kills.total())

    def stop(self, number: int) -> Tally:
        """Make stopped runs until `number` stops have happened."""
        return self._repeat("stopped", self._stop, lambda: number - self.tally.stops.by_moment.total())

    def _repeat(self, kind: str, end: End, left: Callable[[], int]) -> Tally:
        while left() > 0:
            name = f"{kind}-{self.tally.runs}"
            final = self._learn(name, ends=left(), end=end)
            self.tally.runs += 1
            assert final.keys() == self._whole.keys()
            unequal = [key for key in final if not torch.equal(final[key], self._whole[key])]
            self.tally.unequal_tensors += [f"{name}: {key}" for key in unequal]
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
        daemon = DaemonProcess(self._folder / name, config)
        try:
            died = False
            while daemon.journalled_step() < STEPS:
                died = self._live(daemon, end if ends > 0 else None, after_another=died)
                ends -= died
            if daemon.is_running:
                code = daemon.terminate()
                assert code == 0, f"{name}: exit code {code}"
            open_end = not_covered(daemon)
            assert open_end is None, f"{name}: ended between its last journal line and that step: {open_end}"
        finally:
            daemon.end()
        self._audit(name, daemon, dead)
        return daemon.newest().tensors()

    def _live(self, daemon: DaemonProcess, end: End | None, *, after_another: bool) -> bool:
        """One life: to the end of the stream, or to the moment that is drawn for it; whether that came."""
        before, started, learned_at = daemon.journalled_step(), time.monotonic(), None
        moment, delay = self._draw(end)
        daemon.start()
        while (step := daemon.journalled_step()) < STEPS:
            now = time.monotonic()
            assert now - started < MAX_LIFE_S, daemon.log.read_text()[-3000:]
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
            elif moment is not None and end is not None and due[moment] and step < STEPS - TOO_LATE:
                end(daemon, moment, learning=learning)
                return True
            assert daemon.is_running, daemon.log.read_text()[-3000:]
            time.sleep(0.002)
        return False

    def _draw(self, end: End | None) -> tuple[str | None, float]:
        """The moment of a life, and how long after its beginning."""
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
        self.tally.repeated_letters += sum(count - 1 for count in offsets.values())
        if len(offsets) != BAD:
            self.tally.wrong_ledgers.append(f"{name}: {len(offsets)} dead letters, {BAD} unusable records")
