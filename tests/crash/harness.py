"""Runs of the daemon that are killed again and again until the stream is learned, against one that never is.

A kill is drawn from the seed: somewhere in a start, some milliseconds into learning, or while a snapshot is being
written. After each the state folder holds what a crash left; the next life goes on from there. In the end every tensor
of adapter, optimizer, detector and regimes must be bit-equal to the run that was never killed, each record trained or
set aside once, and each dead letter written once.
"""

import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch

from tests.broker import Broker
from tests.end_to_end.process import DaemonProcess, configuration

PER_BATCH, PER_TASK, TAIL = 8, 200, 16
TASKS = ("what is the colour of the fox", "say hello to the small world", "the quick brown dog jumps over")
RUBBISH = (b"not json", b"", b'{"text": 5}', b'{"prompt": "no completion"}')
GOOD, BAD = PER_TASK * len(TASKS), 12
STEPS = GOOD // PER_BATCH
STARTING, LEARNING, SAVING = "starting", "learning", "saving"
START_S, LEARN_S = 6.0, 1.5
"""Longest time into a start, and into learning, at which it is killed."""
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
    runs: int = 0
    unequal_tensors: list[str] = field(default_factory=list)
    wrong_ledgers: list[str] = field(default_factory=list)
    repeated_letters: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    """From the start of a process after a kill to its first new step."""

    def to_json(self) -> dict[str, Any]:
        """Figures."""
        taken = sorted(self.recoveries_s)
        return {
            "kills": self.kills.total(),
            "kills_by_moment": dict(self.kills),
            "runs": self.runs,
            "unequal_tensors": self.unequal_tensors,
            "wrong_ledgers": self.wrong_ledgers,
            "repeated_dead_letters": self.repeated_letters,
            "recoveries": len(taken),
            "recovery_p50_s": round(statistics.median(taken), 2) if taken else None,
            "recovery_p99_s": round(taken[int(0.99 * len(taken))], 2) if taken else None,
        }

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, repeated or changed."""
        return not (self.unequal_tensors or self.wrong_ledgers or self.repeated_letters)


class Harness:
    """One broker, one reference run, any number of killed ones."""

    def __init__(self, broker: Broker, backbone: Path, folder: Path, seed: int) -> None:
        self._broker, self._backbone, self._folder = broker, backbone, folder
        self._random = random.Random(seed)
        self._records = records(seed)
        self.tally = Tally()
        self._whole = self._learn("whole", kills=0)

    def kill(self, number: int) -> Tally:
        """Make killed runs until `number` kills have happened."""
        while self.tally.kills.total() < number:
            name = f"killed-{self.tally.runs}"
            final = self._learn(name, kills=number - self.tally.kills.total())
            self.tally.runs += 1
            assert final.keys() == self._whole.keys()
            unequal = [key for key in final if not torch.equal(final[key], self._whole[key])]
            self.tally.unequal_tensors += [f"{name}: {key}" for key in unequal]
        return self.tally

    def _learn(self, name: str, kills: int) -> dict[str, torch.Tensor]:
        topic, dead = self._broker.new_topic(), self._broker.new_topic()
        self._broker.produce(topic, self._records)
        config = configuration(self._broker, topic, dead, self._backbone, PER_BATCH)
        config["snapshot"] = {"every_records": 80}
        config["probe"] = {"warmup_tokens": 256, "similarity_tokens": 128}
        daemon = DaemonProcess(self._folder / name, config)
        try:
            died = False
            while daemon.journalled_step() < STEPS:
                self._live(daemon, after_a_kill=died, may_die=kills > 0)
                died = daemon.journalled_step() < STEPS
                kills -= died
            code = daemon.terminate()
            assert code == 0, f"{name}: exit code {code}"
        finally:
            daemon.end()
        self._audit(name, daemon, dead)
        return daemon.newest().tensors()

    def _live(self, daemon: DaemonProcess, *, after_a_kill: bool, may_die: bool) -> None:
        """One life: to the end of the stream, or to the moment that is drawn for it."""
        before, started, learned_at = daemon.journalled_step(), time.monotonic(), None
        moment = self._random.choices((STARTING, LEARNING, SAVING), (2, 5, 3))[0] if may_die else None
        delay = self._random.uniform(0, START_S if moment == STARTING else LEARN_S)
        daemon.start()
        while (step := daemon.journalled_step()) < STEPS:
            now = time.monotonic()
            assert now - started < MAX_LIFE_S, daemon.log.read_text()[-3000:]
            if learned_at is None and step > before:
                learned_at = now
                if after_a_kill:
                    self.tally.recoveries_s.append(now - started)
            due = {
                STARTING: now - started >= delay,
                LEARNING: learned_at is not None and now - learned_at >= delay,
                SAVING: learned_at is not None and any((daemon.state / "snapshots").glob(".staging-*")),
            }
            if moment is not None and due[moment]:
                daemon.kill()
                self.tally.kills[moment] += 1
                return
            assert daemon.is_running, daemon.log.read_text()[-3000:]
            time.sleep(0.002)

    def _audit(self, name: str, daemon: DaemonProcess, dead: str) -> None:
        ledger = daemon.newest().ledger()
        if ledger != {0: (GOOD, BAD, GOOD + BAD)}:
            self.tally.wrong_ledgers.append(f"{name}: {ledger}")
        headers = [dict(message.headers) for message in self._broker.read_all(dead)]
        offsets = Counter(header["__streamlearn.errors.offset"] for header in headers)
        self.tally.repeated_letters += sum(count - 1 for count in offsets.values())
        if len(offsets) != BAD:
            self.tally.wrong_ledgers.append(f"{name}: {len(offsets)} dead letters, {BAD} unusable records")
