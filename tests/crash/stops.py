"""Stops of a daemon by SIGTERM: its exit code, its duration, and what the next process would repeat."""

import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.crash.figures import percentile
from tests.end_to_end.process import DaemonProcess

LONGEST_S = 10.0
"""Maximum time from the signal to the exit while learning."""


@dataclass
class Stops:
    """SIGTERMs so far."""

    by_moment: Counter[str] = field(default_factory=Counter)
    before_handler: int = 0
    """Processes ended by the signal itself, before the handler was installed; nothing was open yet."""
    bad_exits: list[str] = field(default_factory=list)
    replayed: list[str] = field(default_factory=list)
    """Stops after which the newest snapshot did not cover every journalled batch."""
    seconds: list[float] = field(default_factory=list)
    """Times from the signal to the exit, of processes that had taken a step."""

    def stop(self, daemon: DaemonProcess, moment: str, *, learning: bool) -> None:
        """Stop a daemon, wait for it, and check its state folder."""
        started = time.monotonic()
        code = daemon.terminate()
        seconds = time.monotonic() - started
        self.by_moment[moment] += 1
        where = f"{daemon.state.parent.name}, {moment}"
        if code == -signal.SIGTERM and not learning:
            self.before_handler += 1
        elif code != 0:
            self.bad_exits.append(f"{where}: {code}")
        if learning:
            self.seconds.append(seconds)
        if (uncovered := not_covered(daemon)) is not None:
            self.replayed.append(f"{where}: {uncovered}")

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "stops": self.by_moment.total(),
            "stops_by_moment": dict(self.by_moment),
            "before_handler": self.before_handler,
            "bad_exits": self.bad_exits,
            "replayed": self.replayed,
            "stops_while_learning": len(self.seconds),
            "stop_p50_s": round(percentile(self.seconds, 50), 2),
            "stop_p99_s": round(percentile(self.seconds, 99), 2),
            "slowest_stop_s": round(max(self.seconds, default=0.0), 2),
        }

    @property
    def clean(self) -> bool:
        """Whether every stop was clean, in time, and left nothing to repeat."""
        return not (self.bad_exits or self.replayed) and max(self.seconds, default=0.0) <= LONGEST_S


def not_covered(daemon: DaemonProcess) -> str | None:
    """Return what the next process would train again, or None, by comparing the newest snapshot with the journal."""
    if not daemon.has_snapshot:
        step = daemon.journalled_step()
        return f"no snapshot, and {step} journalled" if step else None
    manifest, last = daemon.newest().manifest, daemon.last_journalled()
    if last is None:
        return None if manifest["step"] == 0 else f"no journal at step {manifest['step']}"
    position = {(topic, partition): offset for topic, partition, offset in manifest["position"]}
    if manifest["step"] != last["step"]:
        return f"the snapshot is of step {manifest['step']}, the journal of {last['step']}"
    uncovered = [run for run in last["runs"] if position[run[0], run[1]] < run[3]]
    return f"the snapshot is at {position}, the journal is past it: {uncovered}" if uncovered else None
